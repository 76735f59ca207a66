"""Trained weights back into a module."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.errors import ExportError
from graphscale.exporters.requirements import require
from graphscale.exporters.trained_state import read_trained

__all__ = ["load_weights"]


def load_weights(step_or_state: Any, module: Any) -> None:
    """Put the trained weights and buffers of an exported step into the module that it was made from.

    Args:
        step_or_state: a gs.Session, its `state_dict()`, a file of it (.npz, .safetensors), or a step whose initializers
            hold trained values.
        module: the torch.nn.Module, changed in place: its parameters and buffers of the same names.

    Raises:
        ExportError: a trained weight is missing, or has another shape or dtype; the module is not changed.
        ModelFileError: the file is missing, or of another format.
    """
    require("pytorch", ("torch", "torch"))
    import torch

    from graphscale.exporters.pytorch.training_step import MASTER

    values = read_trained(step_or_state)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    needed = [name for name, p in module.named_parameters() if p.requires_grad]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ExportError(
            f"there is no trained value of {missing[0]!r}, a parameter of the module; "
            f"{len(needed) - len(missing)} of {len(needed)} are there"
        )
    fitting = {}
    for name, target in own.items():
        # A float32 module gets the masters of a step in float16.
        found = values.get(f"{name}{MASTER}", values.get(name))
        if found is None:
            continue
        if tuple(found.shape) != tuple(target.shape):
            raise ExportError(f"{name!r} has the shape {list(found.shape)}, in the module {list(target.shape)}")
        tensor = torch.from_numpy(np.array(found))
        if tensor.is_floating_point() != target.is_floating_point():
            raise ExportError(f"{name!r} is {tensor.dtype}, in the module {target.dtype}")
        fitting[name] = tensor
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
