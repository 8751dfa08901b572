"""The main job in miniature: a tiny model learns to see, and a fresh process judges it."""
