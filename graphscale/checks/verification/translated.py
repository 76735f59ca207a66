"""The checks by translation validation: nodes, initial values, metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from graphscale.checks.translation.metadata import metadata_differences
from graphscale.checks.translation.models import compare_models
from graphscale.checks.translation.validation import Translation
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.verify_report import SKIPPED, TRANSLATION, UNPROVED, Check
from graphscale.graph.stamp_reading import read_stamp
from graphscale.policy.dynamic_rule import ScaleState
from graphscale.policy.loss_scale import DynamicLossScale, LossScale
from graphscale.step.training_step import Step

__all__ = ["compare_part", "compare_translation", "state_faults"]


def compare_translation(translation: Translation, pair: Pair, *, exact: bool, trained: bool) -> list[Check]:
    """Return the checks of a translation.

    Args:
        translation: the differences between the scaled graph and the original scaled again.
        pair: both graphs.
        exact: False if different nodes are no failure.
        trained: True if carried state may begin at other values, within the range of the policy.
    """
    what = f"{len(translation.nodes)} nodes, each the original's or an inserted piece"
    graph = Check.proved(TRANSLATION, translation.graph, what, UNPROVED)
    if not exact and translation.graph:
        graph = Check(graph.name, SKIPPED, f"not asked for; {translation.graph[0]}", True)
    starts = _trained_faults(translation, pair) if trained else translation.starts.values()
    return [
        graph,
        Check.proved("initial values", starts, f"{len(pair.step.graph.inputs)} inputs"),
        Check.proved("metadata of the scaling", translation.metadata, f"of graphscale {pair.step.stamp.version}"),
    ]


def _trained_faults(translation: Translation, pair: Pair) -> Iterator[str]:
    """Yield initial values that no session can have written."""
    names, values = translation.stamp.names, {value.name: value for value in pair.step.graph.inputs}
    carried = {*translation.stamp.carried}
    for name, difference in translation.starts.items():
        value = values.get(name)
        tensor = None if value is None else value.const_value
        is_fit = tensor is not None and value is not None and (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        if name not in carried or not is_fit:
            yield difference
    tensors = {role: values[name].const_value for role, name in names.items() if name in values}
    yield from state_faults(pair.step.scale.policy, {role: t.numpy() for role, t in tensors.items() if t is not None})


def state_faults(policy: LossScale, arrays: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fault of a loss scale's state, `{role: array}`, if it is out of the range of its policy."""
    if isinstance(policy, DynamicLossScale):
        held = {**vars(policy.rule.initial_state())}
        held |= {role: a.reshape(-1)[0] for role, a in arrays.items() if role in held and a.size == 1}
        fault = policy.rule.find_fault(ScaleState(**held))
        if fault is not None:
            yield f"the initial state of the loss scale is out of the policy's range: {fault}"


def compare_part(step: Step, name: str, expected: ir.Model, version: str) -> list[Check]:
    """Return the checks of one of several models: nodes, initial values, metadata, and their common version."""
    found, stamp = step.model, step.stamp
    same = compare_models(found, expected, f"the graph of {name}")
    wanted = read_stamp(expected.metadata_props, f"the expected {name}")
    what = f"{len(same.nodes)} nodes, each the original's or an inserted piece"
    starts = [value for value in expected.graph.inputs if value.const_value is not None]
    checks = [Check.proved(f"translation of {name}", same.differences, what, UNPROVED)]
    if starts or same.starts:
        checks.append(Check.proved(f"initial values of {name}", same.starts.values(), f"{len(starts)} inputs"))
    different = [*metadata_differences(found, stamp, expected, wanted, same)]
    if stamp.version != version:
        different.append(f"graphscale.version is {stamp.version!r}, and should be {version!r}")
    return [*checks, Check.proved(f"metadata of {name}", different, f"of graphscale {stamp.version}")]
