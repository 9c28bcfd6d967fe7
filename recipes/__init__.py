"""Training recipes for language-model post-training."""
