"""order-writes: let every in-place write wait for the readers of the old value."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from graphscale.passes.nodes.write_order import NAME, order_writes
from graphscale.passes.rewrite import rewrite_of

__all__ = ["OrderWrites"]


@dataclasses.dataclass(frozen=True)
class OrderWrites(InPlacePass):
    """Make each value that is written in place depend on all readers of the state that it overwrites.

    ONNX Runtime does not order an in-place write after the other readers of the old value. Where a reader is no
    ancestor of the written value, one element of its result is led there in a way that cannot change it:

    After:  `seen = IsNaN(first element of r); never = And(seen, Not(seen)); w.ordered = Where(never, state, w)`

    The last pass of a sequence: it also records what it takes to strip the model again.
    """

    def call(self, model: ir.Model) -> PassResult:
        rewrite = rewrite_of(model, NAME, after="guard-updates")
        modified = order_writes(rewrite.bound.editor)
        if rewrite.snapshot is not None:
            rewrite.snapshot.finish(model)
        return PassResult(model, modified=modified or rewrite.snapshot is not None)
