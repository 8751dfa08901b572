"""Patches that make other people's code use this model: Auto classes, peft, child processes."""
