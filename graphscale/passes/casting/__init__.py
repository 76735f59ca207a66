"""Mixed precision: which nodes run in float16 or bfloat16, and the casts at the borders."""
