"""Kernels, and layers that call them; :mod:`reference` computes what the kernels do in torch."""
