"""Data: from files of conversations about images to training batches."""

from contextlib import suppress

with suppress(ImportError):  # if it is installed, Pillow reads HEIC in every process
    from pillow_heif import register_heif_opener  # type: ignore[import-not-found]

    register_heif_opener()
