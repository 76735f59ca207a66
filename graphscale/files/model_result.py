"""A model as the result of a function, which can be saved."""

from __future__ import annotations

import dataclasses
import os

import onnx
import onnx_ir as ir

from graphscale.process.summary import Summary

__all__ = ["ModelResult"]


@dataclasses.dataclass(frozen=True, repr=False)
class ModelResult(Summary):
    """A model made by a function.

    Attributes:
        model: a ModelProto if one was given, else an onnx_ir model.
    """

    model: ir.Model | onnx.ModelProto

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model atomically, as `graphscale.files.saving.save` does: an existing file is replaced.

        Raises:
            OutputError: the folder does not exist, or cannot be written.
        """
        from graphscale.files.saving import save  # not every result is saved

        save(self.model, path)
