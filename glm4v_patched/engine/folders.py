"""Check whether folders can be written to. Needs no torch."""

import os


def find_folder_problem(folder: str) -> str | None:
    """Return why a folder cannot be created or written to, or None if it can."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return "not a folder but a file or a broken link"
    existing = nearest_existing(folder)
    if not os.path.isdir(existing):
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"you have no permission to write to {existing}"
    return None


def nearest_existing(folder: str) -> str:
    """Return the absolute path of a folder, or of its nearest parent that exists."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
