"""What will fail here, before it fails: the machine, and a recipe on it."""
