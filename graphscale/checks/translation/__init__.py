"""Translation validation: the comparison of a scaled graph with the passes' result for the original."""
