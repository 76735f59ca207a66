"""Names of any style are words: separators and capital letters divide them, and case distinguishes none."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphscale.analysis.roles.naming import widest_pattern

pytestmark = pytest.mark.static


def pairs(names: dict[str, str]) -> dict[str, str]:
    """Return the pairs of the widest pattern, of outputs and inputs of one type."""
    outputs, inputs = ([ir.val(name, ir.DataType.FLOAT, (2,)) for name in part] for part in (names, names.values()))
    found = widest_pattern(outputs, inputs, outputs, lambda value: True)
    return {output.name or "": value.name or "" for output, value in found.items()}


@pytest.mark.parametrize(
    "names",
    [
        {"nextL0W": "l0W", "nextL0B": "l0B", "nextML0W": "mL0W", "nextML0B": "mL0B"},
        {"fc0WeightNew": "fc0Weight", "mFc0WeightNew": "mFc0Weight", "vFc0WeightNew": "vFc0Weight"},
        {"NextW1": "w1", "NextW2": "w2"},
        {"next.l0.w": "l0/w", "next.m.l0.w": "m/l0/w"},
        {"w_next": "w", "W_next": "W"},
    ],
    ids=["camel case", "at the end", "a capital first", "separators", "case alone"],
)
def test_all_pairs_by_one_pattern(names: dict[str, str]) -> None:
    assert pairs(names) == names
