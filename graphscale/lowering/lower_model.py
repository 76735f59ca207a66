"""Lowering of a scaled model for one runtime: the passes in their order, and the metadata that say what was done."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphscale.lowering.bound_gradients import BoundGradients
from graphscale.lowering.delay_update import DelayUpdate
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.merge_probes import MergeProbes
from graphscale.lowering.multiply_first import MultiplyFirst
from graphscale.lowering.select_update import SelectUpdate
from graphscale.lowering.thresholds import PRODUCTION, Thresholds

__all__ = ["ORDER", "lower_step"]

# The passes in the order in which they run, by execution provider.
ORDER: Mapping[str, tuple[type[LoweringPass], ...]] = {
    "cpu": (DelayUpdate, MultiplyFirst, MergeProbes, SelectUpdate, BoundGradients),
    "cuda": (DelayUpdate,),
}


def lower_step(model: ir.Model, provider: str, thresholds: Thresholds = PRODUCTION) -> None:
    """Lower a scaled model in place, for one execution provider.

    Raises:
        ModelFileError: it carries no loss scale, or its metadata are damaged.
    """
    ir.passes.Sequential(*(kind(thresholds) for kind in ORDER[provider]))(model)
