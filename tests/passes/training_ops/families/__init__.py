"""Recipes of training operators, one module per family; see `tests/passes/training_ops/drawing.py`."""
