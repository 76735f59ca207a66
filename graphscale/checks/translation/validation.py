"""The validation: the original is scaled again, by the options in a file, and compared with the file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.checks.translation.correspondence import Correspondence
from graphscale.checks.translation.metadata import metadata_differences
from graphscale.checks.translation.models import compare_models
from graphscale.errors import AutocastError, VerifyError, one_line
from graphscale.files.contents import parse_json
from graphscale.graph.builder import Names
from graphscale.graph.stamp import Stamp
from graphscale.graph.stamp_reading import read_stamp
from graphscale.graph.values import rename
from graphscale.mixed_precision import autocast
from graphscale.passes import AddTelemetry, Autocast
from graphscale.passes.casting.settings import make_settings
from graphscale.passes.lower_precision import AUTOCAST_KEY
from graphscale.pipeline import scale
from graphscale.policy.loss_scale import LossScale
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Step
from graphscale.targets import get_target

__all__ = ["Claims", "Translation", "find_scaled_loss", "find_widened", "read_claims", "validate_translation"]

_SCALED_LOSS = re.compile(r"scaled_loss(_\d+)?")


@dataclasses.dataclass(frozen=True)
class Claims:
    """The options of a scaling, claimed by the scaled file.

    Attributes:
        policy: the loss scale.
        target: the target.
        telemetry: the pass that counts steps and skips; None without it.
        expose_scaled_loss: True if the scaled loss is an output.
        gradient_dtype: "float32" if gradients are outputs of a wider type than in the original.
        skip_nonfinite: True if the steps of a fixed loss scale are checked.
        autocast: type, emulation and lists of mixed precision, arguments of `graphscale.autocast`; None without it.
        cast_before: True if an earlier rewrite put the graph into mixed precision.
    """

    policy: LossScale
    target: str
    telemetry: AddTelemetry | None = None
    expose_scaled_loss: bool = False
    gradient_dtype: str | None = None
    skip_nonfinite: bool = False
    autocast: dict[str, Any] | None = None
    cast_before: bool = False

    def cast_pass(self) -> Autocast | None:
        """Return the pass of mixed precision, without hints."""
        if self.autocast is None:
            return None
        return Autocast(self.autocast["dtype"], self.autocast["emulate"], make_settings(lists=self.autocast["lists"]))


def find_scaled_loss(scaled: ir.Graph, original: ir.Graph) -> ir.Value | None:
    """Find the scaled loss among the outputs of a scaled graph, by its name; None without one."""
    names = {value.name for value in original.outputs}
    found = (v for v in scaled.outputs if _SCALED_LOSS.fullmatch(v.name or "") and v.name not in names)
    return next(found, None)


def find_widened(scaled: ir.Graph, original: ir.Graph) -> set[str]:
    """Find the names of the float32 outputs of a scaled graph that are of a smaller type in the original."""
    small = {value.name for value in original.outputs if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)}
    return {v.name for v in scaled.outputs if v.dtype is ir.DataType.FLOAT and v.name and v.name in small}


def read_claims(step: Step, original: ir.Model) -> Claims:
    """Read the options of a scaling from the metadata and the outputs of the scaled model.

    Raises:
        VerifyError: the metadata are damaged.
    """
    stamp, metadata = step.stamp, step.model.metadata_props
    cast = AUTOCAST_KEY in metadata and AUTOCAST_KEY not in original.metadata_props
    return Claims(
        step.scale.policy,
        stamp.target,
        telemetry=AddTelemetry.from_stamp(stamp.telemetry),
        expose_scaled_loss=find_scaled_loss(step.graph, original.graph) is not None,
        gradient_dtype="float32" if find_widened(step.graph, original.graph) else None,
        skip_nonfinite=step.scale.is_fixed and ScaledValue.ALL_FINITE in stamp.names,
        autocast=_read_autocast(metadata[AUTOCAST_KEY]) if cast else None,
        cast_before=cast and stamp.report.get("autocast") is None,
    )


def _read_autocast(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
        settings = {"dtype": found["dtype"], "emulate": bool(found["emulate"]), "lists": found.get("lists")}
        make_settings(lists=settings["lists"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, AutocastError) as error:
        raise VerifyError(f"the property {AUTOCAST_KEY} is damaged: {one_line(error)}") from error
    return settings


def _expect_model(original: ir.Model, claims: Claims, hints: Hints) -> ir.Model:
    """Scale the original again, with the options of the scaled file and the user's hints.

    Raises:
        GraphscaleError: the original is not acceptable with these options, or a role is open.
    """
    named, mixed = {**vars(hints), "target": claims.target}, claims.cast_pass()
    if claims.cast_before and claims.autocast is not None:
        cast = autocast(original, **claims.autocast, **named).model
        assert isinstance(cast, ir.Model)
        original, mixed = cast, None
    scaled = scale(
        original,
        claims.policy,
        **named,
        telemetry=claims.telemetry or False,
        expose_scaled_loss=claims.expose_scaled_loss,
        gradient_dtype=claims.gradient_dtype,
        skip_nonfinite=claims.skip_nonfinite,
        autocast=mixed,
    )
    assert isinstance(scaled.model, ir.Model)
    return scaled.model


@dataclasses.dataclass(frozen=True)
class Translation:
    """The differences between a scaled model and the original scaled again, a sentence each.

    Attributes:
        claims: the options of the scaling, claimed by the file.
        graph: differences between nodes, constants, inputs, outputs, types and functions: the file may still compute
            the same values.
        starts: differences between initial values, by the input's name.
        metadata: differences between the metadata.
        nodes: the matched nodes, each with its counterpart in the expected model.
        stamp: the metadata that the file should have.
        expected: the expected model.
    """

    claims: Claims
    graph: tuple[str, ...]
    starts: Mapping[str, str]
    metadata: tuple[str, ...]
    nodes: Mapping[ir.Node, ir.Node]
    stamp: Stamp
    expected: ir.Model


def validate_translation(original: ir.Model, step: Step, hints: Hints) -> Translation:
    """Compare a scaled model with the original scaled again.

    Values that differ only in their names get the expected names.

    Args:
        original: the model before scaling.
        step: the step of the scaled model, whose metadata are trusted only for the options: policy, target, telemetry
            and so on.
        hints: the hints of the user.

    Raises:
        GraphscaleError: the original cannot be scaled with these options, or a role is open.
    """
    scaled, claims = step.model, read_claims(step, original)
    expected = _expect_model(original, claims, hints)
    same = compare_models(scaled, expected)
    newest = get_target(claims.target).max_ir_version
    if scaled.ir_version > max(newest, expected.ir_version):
        same.differences.append(f"the IR version is {scaled.ir_version}, and {claims.target} loads up to {newest}")
    wanted = read_stamp(expected.metadata_props, "the expected model")
    metadata = tuple(metadata_differences(scaled, step.stamp, expected, wanted, same))
    if not same.differences:
        _rename(scaled.graph, same)
    return Translation(claims, tuple(same.differences), same.starts, metadata, same.nodes, wanted, expected)


def _rename(graph: ir.Graph, same: Correspondence) -> None:
    """Give values and nodes the names of their counterparts."""
    if all(value.name == other.name for value, other in same.values.items()):
        return
    held = list(graph.initializers.values())
    graph.initializers.clear()
    taken = Names(other.name or "" for other in same.back)
    for value, wanted in same.values.items():
        if value.name != wanted.name:
            rename(value, wanted.name or "")
    for node, counterpart in same.nodes.items():
        node.name = counterpart.name
    for value in held:
        if value not in same.values and value.name in taken:
            rename(value, taken.reserve(value.name or ""))
        graph.initializers[value.name or ""] = value
