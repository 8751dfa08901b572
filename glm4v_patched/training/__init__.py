"""What makes a model trainable, fast and small; the demo's props."""
