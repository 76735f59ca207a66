"""One-file training steps from artifact folders, and trained weights back into the models that use them."""

from graphscale.fusing.export_weights import ExportedWeights, export_weights
from graphscale.fusing.fuse import FusedStep, fuse

__all__ = ["ExportedWeights", "FusedStep", "export_weights", "fuse"]
