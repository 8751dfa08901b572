"""The recipe: what to train and how, its launch, its checkpoints."""
