"""Benchmarks of training, generation and ``answer``, at any model size, on the user's machine."""
