"""Measures training of this model, at any size, on the reader's own machine."""
