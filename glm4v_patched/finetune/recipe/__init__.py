"""What is asked: the file of a recipe, its sections, and what they cannot say together."""
