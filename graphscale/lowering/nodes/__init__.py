"""The pieces that lowering puts together: the terms of gradients, their tests, and the bounds of terms."""
