"""One abstract interpreter of graphs, bodies included, and its domains: the questions that are asked of each value."""
