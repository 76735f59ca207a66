"""The facts that every pass carries."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx_ir as ir
from onnx_ir.passes import InPlacePass

from graphscale.graph.builder import Builder, Editor
from graphscale.graph.marks import PASS_KEY

__all__ = ["GraphPass"]


class GraphPass(InPlacePass):
    """A pass. Its facts are class attributes, and nothing else knows its name.

    Attributes:
        name: its name in messages and reports, and the mark of each node that it inserts.
        sign: the sign of its nodes in drawings.
        optional: whether a rewrite runs it only where it was asked for.
        renews_scale: whether its nodes give the next loss scale, or order writes: nothing that is a multiple of it.
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
