"""Facts about operators, as data."""
