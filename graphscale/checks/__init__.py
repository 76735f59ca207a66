"""Checks of a graph: verify, lint, diff, and drawings of them."""
