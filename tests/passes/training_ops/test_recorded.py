"""The standard form of each training operator against recorded results of the kernels, on any ONNX Runtime."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

import onnxruntime as ort
import pytest

from graphscale.graph.releases import release_of
from graphscale.passes.lower_training_ops import FORMULAS
from graphscale.targets import RELEASES
from tests.passes.training_ops.cases import check_case
from tests.passes.training_ops.recorded_cases import FOLDER, Recorded, read_cases


@functools.cache
def recorded() -> dict[tuple[str, str], list[Recorded]]:
    cases = defaultdict(list)
    for path in sorted(FOLDER.glob("*.npz")):
        for case, results in read_cases(path):
            cases[case.domain, case.op_type].append((case, results))
    return dict(cases)


# The newest opset that the installed runtime loads: what operators mean may differ there.
NEWEST = (release_of(ort.__version__) or RELEASES[-1]).max_opset


@pytest.mark.sample(12)
@pytest.mark.every_share
@pytest.mark.parametrize("newest", [False, True], ids=["as-recorded", "newest-opset"])
@pytest.mark.parametrize("operator", sorted(FORMULAS), ids=lambda operator: operator[1])
def test_against_recorded_results(operator: tuple[str, str], newest: bool) -> None:
    for case, results in recorded()[operator]:
        check_case(dataclasses.replace(case, opset=NEWEST) if newest else case, results)
