"""The lowering of a scaled step for one runtime."""

from __future__ import annotations

import onnx

from graphscale.collector import paused_collector
from graphscale.errors import TargetError
from graphscale.files.training_info import to_proto
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp import SPLIT_KEY
from graphscale.graph.stamp_reading import read_stamp
from graphscale.lowering.lower_model import lower_model
from graphscale.pipeline import Model, ScaledModel, open_copy
from graphscale.policy.names import ScaledValue
from graphscale.targets import get_target, target_names

__all__ = ["lower"]


@name_damage
@paused_collector()
def lower(scaled: Model | ScaledModel, target: str = "ort-cpu") -> ScaledModel:
    """Lower a scaled step to the form that one runtime runs fastest. The given model is not changed.

    The state keeps its inputs and outputs, with their names, and all operators are standard ones. Outputs and states
    keep every bit, except where an intermediate number is subnormal. `graphscale.in_place` in the metadata names the
    carried inputs that may share one buffer with their next value. `scale(..., target="ort-cpu")` gives the same model.

    Args:
        scaled: a path, an onnx_ir model or a ModelProto, scaled for target "onnx"; or the result of `scale`.
        target: the target, "ort-cpu".

    Raises:
        TargetError: graphs are not lowered for this target, or the step was scaled for another one.
        ModelFileError: the model carries no loss scale, or is damaged.
    """
    chosen = get_target(target)
    if not chosen.plain:
        names = target_names(lambda each: bool(each.plain))
        raise TargetError(f"graphs are not lowered for target {target!r}, but for {names}")
    model = scaled.model if isinstance(scaled, ScaledModel) else scaled
    work, name = open_copy(model)
    stamp = read_stamp(work, name)
    if (
        SPLIT_KEY in work.metadata_props
        or ScaledValue.WINDOW_FINITE in stamp.names
        or ScaledValue.LOSS not in stamp.names
    ):
        raise TargetError(f"{name} is a part of a step; whole steps are lowered, in one file each")
    if stamp.target != chosen.plain:
        raise TargetError(
            f"{name} was scaled for target {stamp.target!r}; for {target!r} scale its original with --target {target}"
        )
    report = lower_model(work, chosen)
    return ScaledModel(to_proto(work) if isinstance(model, onnx.ModelProto) else work, report)
