"""Models, tensors and checkpoints on disk."""
