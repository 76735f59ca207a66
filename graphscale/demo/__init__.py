"""The demo: a digit classifier, trained from a scaled PyTorch training step with one overflow on the way."""
