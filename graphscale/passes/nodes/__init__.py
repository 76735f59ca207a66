"""The nodes inserted by passes."""
