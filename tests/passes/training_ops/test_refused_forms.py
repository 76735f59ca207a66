"""Forms of operators that have no standard form, or none in an opset: each is refused in one line with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphscale.errors import UnsupportedModelError
from tests.passes.training_ops.cases import Case, lower_case

X = np.ones((1, 1, 2, 2), np.float32)
DY = np.ones((1, 1, 4, 4), np.float32)
NUMBER, AXES, FLAG = np.ones((), np.float32), np.int64([0, 1]), np.ones(1, np.float32)

FORMS: dict[str, tuple[Case, str]] = {
    "nearest": (Case("ResizeGrad", (DY, X)), "mode 'nearest'"),
    "asymmetric": (
        Case("ResizeGrad", (DY, X), {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}),
        "coordinate_transformation_mode 'asymmetric'",
    ),
    "antialias": (Case("ResizeGrad", (DY, X), {"mode": "linear", "antialias": 1}), "antialias 1"),
    "one axis": (Case("ResizeGrad", (DY[0], X[0]), {"mode": "linear"}), "two spatial axes, not 1"),
    "infinity": (
        Case("IsAllFinite", (X,), {"isinf_only": 1, "isnan_only": 1}),
        "isinf_only and isnan_only are both set",
    ),
    "rounding": (Case("FakeQuant", (X, NUMBER, NUMBER), outputs=2, opset=10), "opset 11"),
    "sums": (Case("ReduceSumTraining", (X, AXES), {"keepdims": 0}, opset=12), "computed axes need opset 13"),
    "rows": (Case("PadAndUnflatten", (X[0, 0], AXES, AXES + 1), opset=10), "opset 11"),
    "places": (Case("GatherNDGrad", (AXES, AXES[None], FLAG), static=False), "the last axis of the indices"),
}


@pytest.mark.static
@pytest.mark.parametrize("name", FORMS)
def test_refused(name: str) -> None:
    case, reason = FORMS[name]
    results: list[Any] = [X] * len(case.output_names)
    with pytest.raises(
        UnsupportedModelError, match=rf"^\S+ node 'the-node' has no standard form: [^\n]*{reason}[^\n]*$"
    ):
        lower_case(case, results)
