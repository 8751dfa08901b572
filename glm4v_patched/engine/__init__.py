"""Makes a model trainable, fast and small, independently of the Trainer and of data."""
