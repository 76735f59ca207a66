"""Lowering, one pass a file: a scaled step as one runtime runs it fastest. It stays the same step, bit for bit."""
