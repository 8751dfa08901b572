"""Makes other people's code use this model: the Auto classes, and models that are built already."""
