"""lower: a scaled step as a file that one runtime runs fastest."""

from __future__ import annotations

import onnx

from graphscale.collector import paused_collector
from graphscale.errors import TargetError
from graphscale.files.training_info import to_proto
from graphscale.graph.diagnosis import name_damage
from graphscale.graph.stamp import SPLIT_KEY, read_stamp
from graphscale.lowering.lower_model import lower_model
from graphscale.pipeline import Model, ScaledModel, open_copy, read_report
from graphscale.targets import get_target, target_names

__all__ = ["lower"]


@name_damage
@paused_collector()
def lower(scaled: Model | ScaledModel, target: str = "ort-cpu") -> ScaledModel:
    """Lower a scaled step: the same step, as one runtime runs it fastest. The model given is not changed.

    The state goes through inputs and outputs as before, under the same names, and all operators are standard ones.
    Outputs and states keep every bit, except where a number is subnormal on the way. `graphscale.in_place` in the
    metadata names the carried inputs that may share one buffer with their next value. `scale(..., target="ort-cpu")`
    gives the same model.

    Args:
        scaled: a path, an onnx_ir model or a ModelProto, scaled for target "onnx"; or the result of `scale`.
        target: the target, "ort-cpu".

    Raises:
        TargetError: the target is none to lower for, or the step was scaled for another one.
        ModelFileError: the model carries no loss scale, or is damaged.
    """
    chosen = get_target(target)
    if not chosen.plain:
        names = target_names(lambda each: bool(each.plain))
        raise TargetError(f"graphs are not lowered for target {target!r}, but for {names}")
    model = scaled.model if isinstance(scaled, ScaledModel) else scaled
    work, name = open_copy(model)
    stamp = read_stamp(work, name)
    if SPLIT_KEY in work.metadata_props or "window_finite" in stamp.names or "loss" not in stamp.names:
        raise TargetError(f"{name} is a part of a step; whole steps are lowered, in one file each")
    if stamp.target != chosen.plain:
        raise TargetError(
            f"{name} was scaled for target {stamp.target!r}; for {target!r} scale its original with --target {target}"
        )
    lower_model(work, chosen)
    report = read_report(read_stamp(work, name), name)
    return ScaledModel(to_proto(work) if isinstance(model, onnx.ModelProto) else work, report)
