"""Patches of transformers and peft, with which other people's code uses this model."""
