"""Lowering of a scaled model for one runtime: the passes in their order, and the record in the metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from graphscale.analysis.hazards import find_writable_states
from graphscale.analysis.report import Report
from graphscale.analysis.report_reading import read_report
from graphscale.errors import ModelFileError
from graphscale.graph.builder import count_inserted
from graphscale.graph.inference import complete_types
from graphscale.graph.original import ORIGINAL_KEY, record_original
from graphscale.graph.restored import restore_original
from graphscale.graph.stamp import is_scaled
from graphscale.graph.stamp_reading import read_stamp
from graphscale.lowering.bound_accumulation import BoundAccumulation
from graphscale.lowering.bound_gradients import BoundGradients
from graphscale.lowering.delay_update import DelayUpdate
from graphscale.lowering.flag_window import FlagWindow
from graphscale.lowering.lowering_pass import LoweringPass, is_inserted
from graphscale.lowering.merge_probes import MergeProbes
from graphscale.lowering.multiply_first import MultiplyFirst
from graphscale.lowering.read_flag import ReadFlag
from graphscale.lowering.select_update import SelectUpdate
from graphscale.lowering.thresholds import PRODUCTION, Thresholds
from graphscale.passes import run_passes
from graphscale.process.stages import report_stage
from graphscale.step.scaled_step import read
from graphscale.targets import TARGETS, Target

__all__ = ["ORDER", "count_lowered", "find_states_in_place", "is_lowered", "lower_model", "lower_step", "plain_form"]

# The passes in running order, by execution provider, and for the models of a training session on a CPU.
ORDER: Mapping[str, tuple[type[LoweringPass], ...]] = {
    "cpu": (DelayUpdate, MultiplyFirst, MergeProbes, SelectUpdate, BoundGradients),
    "cuda": (DelayUpdate,),
    "training": (MergeProbes, FlagWindow, BoundAccumulation, ReadFlag),
}


def lower_step(model: ir.Model, provider: str, thresholds: Thresholds = PRODUCTION) -> None:
    """Lower the graph of a scaled model in place, for one execution provider, with missing shapes inferred.

    Raises:
        ModelFileError: the model carries no loss scale, or its metadata are damaged.
    """
    report_stage("lowering the step")
    step = read(model)
    if step.guard is not None:
        complete_types(model, [quotient.value for quotient in step.quotients])
    run_passes(model, *(kind(thresholds) for kind in ORDER[provider]))


def lower_model(model: ir.Model, target: Target) -> Report:
    """Lower a scaled model in place, with its metadata, and return its report; `plain_form` undoes it.

    Args:
        model: a model that was scaled for the target `target.plain`; or the training model or the optimizer model of a
            folder that was scaled for `target`.
        target: the target.

    Raises:
        ModelFileError: the metadata of the model are damaged.
    """
    provider = "cpu" if target.plain else "training"
    stamp = read_stamp(model, "the model")
    read_report(stamp, "the model")
    with record_original(model):
        lower_step(model, provider)
    report = {
        **stamp.report,
        "target": target.name,
        "nodes_after": len(model.graph),
        "inserted": {**stamp.report["inserted"], **count_lowered(model, provider)},
    }
    in_place = sorted(find_states_in_place(model))
    stamp = dataclasses.replace(stamp, target=target.name, report=report, in_place=in_place)
    stamp.write(model)
    return read_report(stamp, "the model")


def count_lowered(model: ir.Model, provider: str) -> dict[str, dict[str, int]]:
    """Count the nodes that lowering for one execution provider inserted: `{pass: {operator: count}}`."""
    names = {kind.name for kind in ORDER[provider]}
    return {name: counts for name, counts in count_inserted(model.graph.all_nodes()).items() if name in names}


def find_states_in_place(model: ir.Model) -> set[str]:
    """Find the carried inputs of a scaled model whose next value can be written over the present one."""
    step = read(model)
    pairs = {each.input: each.next for each in step.carried if not each.in_place}
    return {value.name or "" for value in find_writable_states(model.graph, pairs, step.guard, is_inserted)}


def is_lowered(model: ir.Model) -> bool:
    """Return whether a model is scaled and lowered."""
    target = TARGETS.get(model.metadata_props.get("graphscale.target", ""))
    if not is_scaled(model) or target is None:
        return False
    return bool(target.plain) or any(kind.inserted(node) for node in model.graph for kind in (FlagWindow, ReadFlag))


def plain_form(model: ir.Model, name: str) -> ir.Model:
    """Return a lowered model's form before lowering, with the present initial values.

    Args:
        model: any model; a model that is not lowered is returned itself.
        name: its name for messages.

    Raises:
        ModelFileError: its record of the plain form is missing or damaged.
    """
    if not is_lowered(model):
        return model
    if ORIGINAL_KEY not in model.metadata_props:
        raise ModelFileError(f"{name} has lost its plain form: another tool dropped its metadata; lower it again")
    plain = restore_original(model)
    if not is_scaled(plain) or is_lowered(plain):
        raise ModelFileError(f"{name} has damaged graphscale metadata: its plain form carries no loss scale")
    return plain
