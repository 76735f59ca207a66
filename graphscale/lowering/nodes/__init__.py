"""The parts of lowering: products, bounds, and tests of gradients."""
