"""Finds what would make a training fail, before it starts: on this machine, and with a recipe."""
