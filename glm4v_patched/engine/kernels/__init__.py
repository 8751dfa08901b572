"""Kernels, and the numbers that they take."""
