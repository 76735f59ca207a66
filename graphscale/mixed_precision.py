"""Mixed precision for training graphs: `graphscale.autocast`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from graphscale.analysis.hints import Hints, read_stated_roles
from graphscale.analysis.report import Report
from graphscale.analysis.roles.answers import Answers
from graphscale.collector import paused_collector
from graphscale.errors import AutocastError
from graphscale.files.model_result import ModelResult
from graphscale.files.training_info import drop_training_info, to_proto, training_info_of
from graphscale.graph.damage import name_damage
from graphscale.graph.original import record_original
from graphscale.graph.releases import check_versions
from graphscale.graph.stamp import ROLES_KEY, is_scaled, refuse_scaled
from graphscale.passes import Autocast, replace_training_ops
from graphscale.passes.casting.cast_report import AutocastReport
from graphscale.passes.casting.settings import make_settings
from graphscale.passes.preparation import prepare
from graphscale.pipeline import LEFT_OUT, Model, open_copy_with_proto, scale
from graphscale.process.summary import Row
from graphscale.targets import get_target

__all__ = ["AutocastModel", "autocast"]


@dataclasses.dataclass(frozen=True, repr=False)
class AutocastModel(ModelResult):
    """The result of `autocast`.

    Attributes:
        model: the model in mixed precision: a ModelProto if one was given, else an onnx_ir model.
        report: the nodes in the small type, and the reasons why others are not.
        scaling: the report of the loss scaling, or None without `loss_scale`.
    """

    report: AutocastReport
    scaling: Report | None = None

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        line, rows = self.report._summarize()
        if self.scaling is None:
            return f"{line}, without a loss scale", rows
        scaled, more = self.scaling._summarize()
        return f"{line}, {scaled}", (*rows, *more)


@name_damage
@paused_collector()
def autocast(
    model: Model,
    dtype: str = "float16",
    *,
    emulate: bool = False,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    keep: Iterable[str] = (),
    lists: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    loss_scale: Any = None,
    loss: str | Sequence[str] | None = None,
    seed: str | None = None,
    gradients: Sequence[str] | None = None,
    updates: Mapping[str, str] | None = None,
    roles: Any = None,
    target: str = "onnx",
) -> AutocastModel:
    """Put a float32 training graph into mixed precision. The model given is not changed.

    Contractions, and safe operators between them, run in the small type; weights, moments and all carried state, the
    loss, the seed of the backward pass, gradients and the optimizer stay float32. The lists are those of TensorFlow's
    graph rewrite (grappler's auto_mixed_precision), carried over to ONNX; `graphscale.operators.columns` holds them
    with the reason for each denied operator.

    Args:
        model: a path, an onnx_ir model or a ModelProto, without a loss scale.
        dtype: "float16", which needs a loss scale, or "bfloat16", which has the range of float32 and needs none.
        emulate: leave all nodes in float32 and round every value that would be of the small type by a pair of casts:
            overflow, underflow and rounding are then those of float16 on a CPU, too.
        allow: operators for the allow list, a name or `domain::name`.
        deny: operators for the deny list.
        keep: the names of nodes that stay float32.
        lists: `{"allow": [...], "infer": [...], "clear": [...], "deny": [...], "keep": [...]}`, or the path of a JSON
            file that holds it.
        loss_scale: scale the result, too, as `scale` does; None for no loss scale.
        loss: as for `scale`.
        seed: as for `scale`.
        gradients: as for `scale`.
        updates: as for `scale`.
        roles: as for `scale`.
        target: the runtime that executes the graph.

    Raises:
        GraphscaleError: the input is not acceptable; each kind is a class of `graphscale.errors`.
    """
    settings = make_settings(allow, deny, keep, lists)
    hints = Hints(loss, seed, gradients or (), updates, None if roles is None else Answers.of(roles))
    mixed = Autocast(dtype, emulate, settings, **vars(hints), target=target)
    if loss_scale is not None:
        scaled = scale(model, loss_scale, **vars(hints), target=target, autocast=mixed)
        assert mixed.report is not None
        return AutocastModel(scaled.model, mixed.report, scaled.report)
    work, name, proto = open_copy_with_proto(model)
    if is_scaled(work):
        raise AutocastError(f"{name} carries a loss scale already; autocast the original, then scale it")
    refuse_scaled(work, name)
    check_versions(work, get_target(target))
    with record_original(work, proto):
        warnings = prepare(work)
        replace_training_ops(work, get_target(target))
        mixed.rewrite(work)
        if training_info_of(work):
            work.metadata_props[ROLES_KEY] = read_stated_roles(work).to_json()
            warnings.append(f"training_info was read as roles, and {LEFT_OUT}; {ROLES_KEY} has them")
            drop_training_info(work)
    assert mixed.report is not None
    report = dataclasses.replace(mixed.report, warnings=(*warnings, *mixed.report.warnings))
    return AutocastModel(to_proto(work) if isinstance(model, onnx.ModelProto) else work, report)
