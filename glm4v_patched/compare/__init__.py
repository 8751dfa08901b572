"""The published code against ours, on the same weights and the same rows."""
