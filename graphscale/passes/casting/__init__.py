"""Mixed precision: the choice of nodes that run in float16 or bfloat16, and the casts at the borders."""
