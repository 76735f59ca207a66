"""The base class of passes, and a run of passes."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassError

from graphscale.graph.builder import Builder, Editor
from graphscale.graph.marks import PASS_KEY
from graphscale.process.stages import report_stage

__all__ = ["GraphPass", "run_passes"]


class GraphPass(InPlacePass):
    """A pass. Its properties are class attributes; no other module knows its name.

    Attributes:
        name: its name in messages and reports, and the mark of each node that it inserts.
        sign: the sign of its nodes in drawings.
        optional: True if a rewrite runs the pass only on request.
        renews_scale: True if its nodes compute the next loss scale, or order writes: none computes a multiple of the
            scale.
    """

    name: ClassVar[str]
    sign: ClassVar[str] = "+"
    optional: ClassVar[bool] = False
    renews_scale: ClassVar[bool] = False

    @classmethod
    def builder(cls, editor: Editor, **defaults: Any) -> Builder:
        """Return a builder of this pass's nodes; see `Builder` for the defaults."""
        return editor.builder(cls.name, **defaults)

    @classmethod
    def inserted(cls, node: ir.Node) -> bool:
        """Return whether this pass inserted a node."""
        return node.metadata_props.get(PASS_KEY) == cls.name


def run_passes(model: ir.Model, *passes: ir.passes.PassBase) -> None:
    """Run passes in order.

    Raises:
        GraphscaleError: the error of a pass, without onnx_ir's error around it.
    """
    try:
        for number, each in enumerate(passes):
            report_stage(f"rewriting the graph ({getattr(each, 'name', type(each).__name__)})", number, len(passes))
            each(model)
    except PassError as error:
        cause: BaseException = error
        while isinstance(cause, PassError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from error
