"""Checks of a graph: verify, lint, diff, and their drawings."""
