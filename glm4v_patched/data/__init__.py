"""From files of conversations about pictures to batches."""
