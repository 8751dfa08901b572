"""Whether folders can be written; needs no torch."""

import os


def find_folder_problem(folder: str) -> str | None:
    """Why a folder cannot be written, or made."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return "not a folder but a file or a broken link"
    place = nearest(folder)
    if not os.path.isdir(place):
        return f"{place} is no folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} may not be written"
    return None


def nearest(folder: str) -> str:
    """The folder itself, or what there is of the folders around it."""
    place = os.path.abspath(folder)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return place
