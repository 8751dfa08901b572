"""Kernels, each beside plain torch code that computes the same."""
