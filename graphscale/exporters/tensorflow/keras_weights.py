"""Trained values back into a Keras model and its optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.errors import ExportError
from graphscale.exporters.tensorflow.keras_step import find_optimizers, name_variables
from graphscale.exporters.trained_state import read_trained

__all__ = ["load"]


def load(step_or_state: Any, model: Any) -> None:
    """Load trained values; see `graphscale.exporters.tensorflow.load_weights`."""
    values = read_trained(step_or_state).arrays
    if not model.built:
        raise ExportError(f"{model.name} is not built, so that it has no weights yet; call it on a batch first")
    needed = [variable.path for variable in model.trainable_variables]
    missing = [path for path in needed if path not in values]
    if missing:
        found = next(iter(values), "nothing")
        raise ExportError(
            f"there is no trained value of {missing[0]!r}, a weight of {model.name}; {len(needed) - len(missing)} of "
            f"{len(needed)} are there, beside others such as {found!r}: build the original model, with names for "
            "its layers"
        )
    optimizers = find_optimizers(model)
    for optimizer in optimizers:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    fitting = []
    for name, variable in name_variables(model, optimizers).items():
        value = values.get(name)
        if value is None:
            continue
        if tuple(value.shape) != tuple(variable.shape):
            raise ExportError(f"{name!r} has the shape {list(value.shape)}, in the model {list(variable.shape)}")
        kinds = [np.issubdtype(np.dtype(dtype), np.integer) for dtype in (value.dtype, variable.dtype)]
        if kinds[0] != kinds[1]:
            raise ExportError(f"{name!r} is {value.dtype}, in the model {variable.dtype}")
        fitting.append((variable, value))
    for variable, value in fitting:
        variable.assign(value)
