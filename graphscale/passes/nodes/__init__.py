"""The nodes that passes insert."""
