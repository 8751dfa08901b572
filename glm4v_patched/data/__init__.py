"""From files of conversations about images to batches."""
