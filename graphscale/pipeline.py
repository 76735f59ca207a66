"""The way from a training graph to a scaled one: clone, analyse, run the passes in order, prove, stamp, lower."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from graphscale import passes
from graphscale.analysis.hints import Hints
from graphscale.analysis.loss import may_be_scaled
from graphscale.analysis.report import TELEMETRY, Report, StateReport
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.roles.role_table import RoleTable
from graphscale.collector import paused_collector
from graphscale.files import model_files
from graphscale.files.model_result import ModelResult
from graphscale.files.training_info import copy_training_info, to_proto, training_info_of
from graphscale.graph.builder import PASS_KEY, count_inserted
from graphscale.graph.damage import name_damage
from graphscale.graph.original import record_original
from graphscale.graph.stamp import Stamp, refuse_scaled
from graphscale.graph.values import inner_nodes, subgraphs
from graphscale.graph.walks import NodeIndex
from graphscale.passes import ScaleLoss, replace_training_ops, run_rewrite, scale_nodes
from graphscale.passes.preparation import prepare
from graphscale.policy.loss_scale import get_policy
from graphscale.process.stages import report_stage
from graphscale.process.summary import Row
from graphscale.step.training_step import Step
from graphscale.targets import advise, get_target

if TYPE_CHECKING:
    from graphscale.analysis.own_scale import OwnScale

__all__ = [
    "LEFT_OUT",
    "Model",
    "ScaledModel",
    "complete_report",
    "make_stamp",
    "open_copy",
    "open_copy_with_proto",
    "scale",
]

# The end of a warning.
LEFT_OUT = "left out of the new model, its initialization included"

# The models that the public functions accept: a path, an onnx_ir model or a ModelProto.
Model = str | os.PathLike[str] | ir.Model | onnx.ModelProto


@dataclasses.dataclass(frozen=True, repr=False)
class ScaledModel(ModelResult):
    """The result of `scale`.

    Attributes:
        model: the scaled model: a ModelProto if one was given, else an onnx_ir model.
        report: findings and changes.
    """

    report: Report

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        return self.report._summarize()


@name_damage
@paused_collector()
def scale(
    model: Model,
    loss_scale: Any = "dynamic",
    *,
    loss: str | Sequence[str] | None = None,
    seed: str | None = None,
    gradients: Sequence[str] | None = None,
    updates: Mapping[str, str] | None = None,
    target: str = "onnx",
    roles: Any = None,
    keep: Sequence[str] | None = None,
    force_roles: bool = False,
    accept: bool = False,
    skip_nonfinite: bool = False,
    expose_scaled_loss: bool = False,
    gradient_dtype: str | None = None,
    telemetry: bool | str | passes.AddTelemetry = False,
    autocast: str | passes.Autocast | None = None,
    trial: bool = False,
) -> ScaledModel:
    """Put loss scaling into a training graph. The model given is not changed.

    Args:
        model: a path, an onnx_ir model or a ModelProto: forward and backward pass, with or without the optimizer.
        loss_scale: "dynamic", a number of at least 1, a `LossScale`, or `{"class_name": ..., "config": {...}}`.
        loss: the name of the loss, or a list of several; None to find it among the scalar floating-point outputs.
        seed: `NODE:INDEX`, the input of a node where the scale enters; None to find the places.
        gradients: names of values that are gradients, where the optimizer begins.
        updates: `{output name: input name}` for carried state that the analysis cannot pair; `{"{}_next": "{}"}` pairs
            all outputs and inputs of such names.
        target: the runtime that executes the graph, one of `graphscale.targets.TARGETS`.
        roles: answers about roles: the content of a roles file (see docs/concepts/roles.md), or None.
        keep: outputs among the carried state that advance on skipped steps, too.
        force_roles: accept the answers even where the graph contradicts them.
        accept: take the proposals for all outputs whose roles are open; the report names them.
        skip_nonfinite: check and guard the step for a fixed loss scale as well, unlike TensorFlow.
        expose_scaled_loss: append the output `scaled_loss`.
        gradient_dtype: "float32" for float32 outputs in place of gradients that leave the graph in a smaller type;
            unscaled, small numbers are zero there.
        telemetry: count steps and skips in the carried state, and report the cause of a skip, the first gradient that
            was not finite, and the share of gradient elements that are zero. "ranges" also measures each gradient in
            every 100th step: its largest magnitude, and its shares of zeros and of elements that are not finite;
            `AddTelemetry(ranges=True, every=N)` in every N-th. "activations" also reports the first value of the
            forward pass that was not finite; "ranges,activations" does both.
        autocast: put the graph into mixed precision first: "float16", "bfloat16", or an `Autocast` pass; see
            `graphscale.autocast`.
        trial: run the scaled step beside the original in a child process with limits, where a runtime is installed, as
            the command line does. A library starts no process unasked.

    Raises:
        GraphscaleError: the input is not acceptable; each kind is a class of `graphscale.errors`.
    """
    policy, counting = get_policy(loss_scale), None if telemetry is False else passes.AddTelemetry.of(telemetry)
    chosen, unscale = get_target(target), passes.UnscaleGradients(gradient_dtype)
    work, name, proto = open_copy_with_proto(model)
    index = NodeIndex(work.graph)
    refuse_scaled(work, name, index)
    if not chosen.loads(work):
        from graphscale.graph.releases import check_versions

        check_versions(work, chosen)
    nodes_before = len(work.graph)
    answers = Answers.of(roles).merge(kept=keep or (), forced=force_roles, accepted=accept)
    hints, plain = Hints(loss, seed, gradients or (), updates, answers), chosen.plain or target
    with record_original(work, proto):
        warnings = [*prepare(work, hints, index), *advise(work, chosen)]
        own = own_scale_of(work, hints, index)
        warnings += [] if own is None else own.refuse(name)
        replaced = replace_training_ops(work, chosen, index)
        scale_loss = ScaleLoss(
            policy, target=plain, skip_nonfinite=skip_nonfinite, expose_scaled_loss=expose_scaled_loss
        )
        mixed = None if autocast is None else passes.Autocast.of(autocast, hints, plain)
        if mixed is not None:
            report_stage(f"rewriting the graph ({mixed.name})")
            mixed.rewrite(work, hints)
            index.refresh()
        prepared = None
        if trial:
            from graphscale.graph.order import check_order

            check_order(work.graph)  # a copy is made in order
            prepared = work.clone()
        optional = [unscale, *([] if counting is None else [counting])]
        step = run_rewrite(work, hints, scale_loss, *optional, index=index)
        if mixed is not None and not isinstance(autocast, str | None):
            autocast.report = mixed.report
        with_mark = list(_marked_nodes(work.graph))
        if training_info_of(work):
            warnings.append(f"training_info was read as roles, and {LEFT_OUT}; graphscale.state has the carried state")
        # Nodes with an older mark, such as those of a fused step, are nodes like all others.
        step.prove(scale_nodes([] if step.editor is None else step.editor.made))
        report = dataclasses.replace(
            complete_report(step, with_mark, nodes_before, warnings),
            replaced=replaced,
            autocast=None if mixed is None or mixed.report is None else mixed.report.to_dict(),
        )
        _stamp(step, report, counting).write(work)
    if chosen.plain:
        from graphscale.lowering.lower_model import lower_model  # few steps are lowered here

        report = lower_model(work, chosen)
    if prepared is not None:
        from graphscale.step.step_trial import try_scaled  # for those who ask

        report = try_scaled(model, prepared, work, report, answers.kept)
    return ScaledModel(to_proto(work) if isinstance(model, onnx.ModelProto) else work, report)


def own_scale_of(model: ir.Model, hints: Hints, index: NodeIndex | None = None) -> OwnScale | None:
    """Find the own loss scale of a step; most steps have no number that could be one."""
    if not may_be_scaled(model.graph, index or NodeIndex(model.graph)):
        return None
    from graphscale.analysis.own_scale import find_own_scale

    return find_own_scale(model.graph, hints.stated_by(model).answers.losses)


def open_copy(model: Model) -> tuple[ir.Model, str]:
    """Return a copy of a model to work on, and its name for messages."""
    work, name, _ = open_copy_with_proto(model)
    return work, name


def open_copy_with_proto(model: Model) -> tuple[ir.Model, str, onnx.ModelProto | None]:
    """Return a copy of a model to work on, its name for messages, and the ModelProto that it was read from, if any."""
    if isinstance(model, onnx.ModelProto):
        return model_files.from_proto(model), "the model", model
    if isinstance(model, ir.Model):
        copy = model.clone()
        copy_training_info(model, copy)
        return copy, "the model", None
    work, proto = model_files.load_with_proto(model)
    return work, os.fspath(model), proto


def complete_report(step: Step, own: Iterable[ir.Node], nodes_before: int, warnings: Sequence[str] = ()) -> Report:
    """Complete the report of the analysis by the changes.

    Args:
        step: the step, after all passes.
        own: the nodes that were inserted.
        nodes_before: number of nodes before.
        warnings: further warnings.
    """
    assert step.report is not None and step.editor is not None
    return dataclasses.replace(
        step.report,
        warnings=(*warnings, *step.report.warnings),
        policy=json.loads(step.scale.policy.to_json()),
        target=step.scale.target.name,
        nodes_before=nodes_before,
        nodes_after=len(step.graph),
        inserted=count_inserted(own),
        renamed=dict(step.editor.renamed),
        state=_state(step),
        proved=True,
    )


def _marked_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes with the mark of a pass, bodies included."""
    for node in graph:
        if PASS_KEY in node.metadata_props:
            yield node
        elif node.attributes.data and subgraphs(node):
            yield from (inner for inner in inner_nodes(node) if PASS_KEY in inner.metadata_props)


def _state(step: Step) -> tuple[StateReport, ...]:
    """Report the carried state, counters last."""
    return tuple(
        StateReport(carried.input.name or "", None if carried.in_place else carried.next.name, carried.how)
        for carried in sorted(step.carried, key=lambda carried: carried.how == TELEMETRY)
    )


def _stamp(step: Step, report: Report, counting: passes.AddTelemetry | None) -> Stamp:
    names = {role: value.name or "" for role, value in step.named.items()}
    telemetry = {} if counting is None else counting.to_stamp(step, _checked_names(step))
    return dataclasses.replace(make_stamp(report, names), telemetry=telemetry)


def make_stamp(report: Report, names: dict[str, str]) -> Stamp:
    """Return the metadata of a scaled model, from its complete report and the names of its values by their role."""
    states = {state.input: state.output for state in report.state if state.output is not None}
    release, policy, target = version("graphscale"), report.policy or {}, report.target or ""
    accepted = [entry.name for entry in RoleTable(report.roles).accepted]
    return Stamp(release, policy, states, target, names, report.to_dict(), accepted=accepted)


def _checked_names(step: Step) -> list[str]:
    """Return the names of the checked values in the original graph."""
    names = {quotient.value: quotient.name for quotient in step.quotients}
    return [names.get(value, value.name or "") for value in step.checked]
