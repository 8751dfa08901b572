"""What acts on a model: data and collation, the training recipe, its launch, plots."""
