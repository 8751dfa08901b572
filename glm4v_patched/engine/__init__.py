"""What makes a model trainable, fast and small; knows no Trainer and no data."""
