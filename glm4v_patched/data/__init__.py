"""Data: from files of conversations about images to training batches."""

from contextlib import suppress

with suppress(ImportError):  # every process imports this package, so Pillow can open HEIC there
    from pillow_heif import register_heif_opener  # type: ignore[import-not-found]

    register_heif_opener()
