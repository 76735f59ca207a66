"""The error of a training run that cannot begin, or cannot go on."""

from __future__ import annotations

from graphscale.errors import GraphscaleError

__all__ = ["TrainingError"]


class TrainingError(GraphscaleError):
    """The data, the checkpoint, the metrics or a setting of a training run does not fit."""
