"""Kernels, and the layers that call them; :mod:`reference` has the kernels in plain torch."""
