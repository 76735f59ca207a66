"""Exporters of training steps, one per framework: each is imported, with its framework, when it is called."""
