"""The validation: the original scaled once more, and compared with the file that claims to come from it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.checks.translation.correspondence import Correspondence
from graphscale.checks.translation.expectation import expect_model, read_claims
from graphscale.checks.translation.metadata import metadata_differences
from graphscale.graph.stamp import Stamp, read_stamp
from graphscale.policy.loss_scale import LossScale

__all__ = ["Translation", "validate_translation"]


@dataclasses.dataclass(frozen=True)
class Translation:
    """The differences between a scaled model and that which the original gives, a sentence each.

    Attributes:
        graph: differences between nodes, constants, inputs, outputs, types and functions: the file may still compute
            the same by other means.
        starts: differences between initial values, by the input's name.
        metadata: differences between the metadata.
        nodes: how many nodes correspond.
    """

    graph: tuple[str, ...]
    starts: dict[str, str]
    metadata: tuple[str, ...]
    nodes: int
    expected: ir.Model


def validate_translation(
    original: ir.Model, scaled: ir.Model, stamp: Stamp, policy: LossScale, hints: Hints
) -> Translation:
    """Compare a scaled model with that which the original gives.

    Args:
        original: the model before scaling, as it was given to the scaling.
        scaled: the scaled model.
        stamp: its metadata, which are believed in nothing but the options: policy, target, telemetry and so on.
        policy: its loss scale.
        hints: the hints of the user.

    Raises:
        GraphscaleError: the original cannot be scaled with these options, or a role is open.
    """
    expected = expect_model(original, read_claims(scaled, stamp, policy, original), hints)
    same = Correspondence()
    same.compare(scaled.graph, expected.graph)
    _compare_functions(scaled, expected, same)
    if scaled.opset_imports != expected.opset_imports:
        versions = [", ".join(f"{d or 'ai.onnx'} {v}" for d, v in sorted(m.opset_imports.items())) for m in (scaled, expected)]
        same.differences.append(f"the opsets are {versions[0]}, and should be {versions[1]}")
    wanted = read_stamp(expected.metadata_props, "the expected model")
    differences = tuple(metadata_differences(scaled, stamp, expected, wanted, same))
    return Translation(tuple(same.differences), same.starts, differences, len(same.nodes), expected)


def _compare_functions(scaled: ir.Model, expected: ir.Model, same: Correspondence) -> None:
    for key in dict.fromkeys((*scaled.functions, *expected.functions)):
        name = f"the function {'::'.join(filter(None, key))}"
        if key not in expected.functions:
            same.differences.append(f"{name} is neither the original's nor an inserted piece")
        elif key not in scaled.functions:
            same.differences.append(f"{name} is missing")
        else:
            mine, theirs = scaled.functions[key], expected.functions[key]
            same.compare(mine, theirs, name, named=False)
            # A file keeps no type of an attribute without a default.
            defaults = [{key: repr(attribute.value) for key, attribute in f.attributes.items()} for f in (mine, theirs)]
            if mine.opset_imports != theirs.opset_imports or defaults[0] != defaults[1]:
                same.differences.append(f"{name} has other opsets or attributes than it should")
