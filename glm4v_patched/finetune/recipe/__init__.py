"""The recipe: its file, its sections, and the rules between its fields."""
