"""Recipes of training operators, a family one module; see `tests/passes/training_ops/drawing.py`."""
