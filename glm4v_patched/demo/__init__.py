"""The demo: a tiny model is trained on drawn images, and tested in a fresh process."""
