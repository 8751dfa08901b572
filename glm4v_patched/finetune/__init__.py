"""Training by a recipe: checks, the plan, the processes, the Trainer, and checkpoints."""
