"""Patches that make transformers and peft use this model, also in child processes."""
