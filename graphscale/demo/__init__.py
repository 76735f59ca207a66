"""The demo: a digit classifier, trained by a scaled PyTorch training step, with one overflow in between."""
