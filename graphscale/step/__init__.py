"""A training step, and the two ways to one: from an original graph, and from a scaled file."""
