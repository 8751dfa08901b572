"""Compares the published code with ours, on the same weights and the same samples."""
