"""A tiny tracer with reverse-mode differentiation: it writes training graphs in the manner of several exporters."""
