"""Training steps of PyTorch: export_step writes one, load_weights puts its trained weights back into the module."""

from graphscale.exporters.pytorch.export import export_step
from graphscale.exporters.pytorch.weights import load_weights

__all__ = ["export_step", "load_weights"]
