"""Losses in forms without a kernel for the CPU, and forms without a standard form."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from graphscale.errors import UnsupportedModelError
from tests.passes.training_ops.cases import Case, check_case, lower_case

SCORES = np.float32([[1, 2, 4], [3, -1, 0.5], [0, 0, 0]])
LABELS = np.int64([1, -1, 2])
PROBABILITIES = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
SLOPE = (PROBABILITIES - np.float32([[0, 1, 0], [0, 0, 0], [0, 0, 1]])) * np.float32([[4], [0], [4]])
FLOAT16 = 10


def test_float16_is_computed_in_the_wider_output_type() -> None:
    log_prob = np.log(PROBABILITIES)
    loss = np.float32(-(log_prob[0, 1] + log_prob[2, 2]) / 2)
    case = Case("SoftmaxCrossEntropyLossInternal", (SCORES.astype(np.float16), LABELS), {"output_type": 1}, 2)
    check_case(case, [loss, log_prob])


def test_a_gradient_of_float16() -> None:
    operands = (np.float32(8), np.log(PROBABILITIES), LABELS)
    case = Case("SoftmaxCrossEntropyLossInternalGrad", operands, {"output_type": FLOAT16}, tolerance=1e-3)
    check_case(case, [SLOPE.astype(np.float16)])


@pytest.mark.static
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["SoftmaxCrossEntropyLossGrad", "SparseSoftmaxCrossEntropyGrad"])
def test_types_are_consistent(name: str, dtype: type) -> None:
    operands = (np.asarray(8, dtype), np.log(PROBABILITIES).astype(dtype), LABELS)
    domain = "" if name.startswith("Sparse") else "com.microsoft"
    lower_case(Case(name, operands, domain=domain), [SLOPE.astype(dtype)])


@pytest.mark.static
def test_an_unusable_reduction() -> None:
    case = Case("SoftmaxCrossEntropy", (SCORES, PROBABILITIES), {"reduction": "none"}, 2)
    with pytest.raises(UnsupportedModelError, match=r"^com\.microsoft::SoftmaxCrossEntropy node 'the-node' [^\n]+none"):
        lower_case(case, [np.float32(0), SCORES])
