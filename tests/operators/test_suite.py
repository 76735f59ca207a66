"""The degrees that the table of operators claims, on every case of ONNX's own operator suite."""

from __future__ import annotations

from tests.operators.known import find_unexpected
from tests.operators.runtimes import RefusedError
from tests.operators.scaling import try_case
from tests.operators.suite import suite_cases
from tests.operators.values import is_float_data

# The runnable single nodes with a floating-point operand; 1,167 of onnx 1.23 with onnxruntime 1.19.
_LEAST = 940


def test_claims_hold_on_the_suite() -> None:
    trials, refused = [], []
    for case in suite_cases():
        if not any(map(is_float_data, case.feeds.values())):
            continue
        try:
            trials.append(try_case(case))
        except RefusedError as error:
            refused.append(f"{case.name}: {error}")
    assert len(trials) >= _LEAST, refused
    assert not find_unexpected(wrong for trial in trials for wrong in trial.wrong)
