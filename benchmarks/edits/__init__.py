"""Random edits of models, at the level of protocol buffers, for `benchmarks/random_edits.py`."""
