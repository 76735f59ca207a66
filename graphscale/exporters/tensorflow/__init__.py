"""Training steps of Keras models: export_step writes one, load_weights puts its trained weights back into the model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from graphscale.exporters.requirements import require

if TYPE_CHECKING:
    from graphscale.exporters.export_report import ExportReport

__all__ = ["export_step"]


def export_step(
    model: Any,
    example_batch: Any,
    path: str | os.PathLike[str],
    *,
    loss: Any = None,
    optimizer: Any = None,
    dynamic_batch: bool = True,
) -> ExportReport:
    """Export."""
    require("tensorflow", ("tensorflow", "tensorflow-cpu"), ("tf2onnx", "tf2onnx"))
    from graphscale.exporters.tensorflow.keras_export import export

    return export(model, example_batch, path, loss, optimizer, dynamic_batch)
