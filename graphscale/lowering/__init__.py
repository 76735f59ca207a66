"""Lowering, one pass per file: the form of a scaled step that one runtime runs fastest, with the same bits."""
