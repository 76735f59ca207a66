"""Training from a scaled step: data, learning rates, checkpoints, metrics, and their picture."""
