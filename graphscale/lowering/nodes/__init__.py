"""The pieces that lowering puts together: products, bounds, and tests of gradients."""
