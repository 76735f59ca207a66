"""The relation of two graphs: equal terms, apart from powers of the loss scale."""
