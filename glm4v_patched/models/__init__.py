"""Models and adapters: where they are, whether they are complete, how they are loaded."""
