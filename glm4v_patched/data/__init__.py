"""Data: from files of conversations about images to training batches."""
