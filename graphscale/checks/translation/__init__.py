"""Translation validation: whether a scaled graph is exactly what the passes make of the original."""
