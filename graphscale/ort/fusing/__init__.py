"""One-file training steps from artifact folders, and the export of trained weights."""

from graphscale.ort.fusing.step import FusedStep, fuse, join_models
from graphscale.ort.fusing.trained_weights import ExportedWeights, export_weights

__all__ = ["ExportedWeights", "FusedStep", "export_weights", "fuse", "join_models"]
