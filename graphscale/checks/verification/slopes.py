"""The derivative check of the original, as a row of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphscale.analysis.hints import Hints
from graphscale.checks.derivatives.differences import DISAGREES
from graphscale.checks.derivatives.gradient_check import check
from graphscale.checks.derivatives.gradient_report import count_agreeing
from graphscale.checks.verification.verify_report import FAILS, HOLDS, SKIPPED, Check
from graphscale.errors import VerifyError
from graphscale.pipeline import Model

__all__ = ["compare_with_slopes"]

_NAME = "gradients are slopes of the loss"


def compare_with_slopes(
    original: Model, feeds: Mapping[str, Any], hints: Hints, seed: int, dims: Mapping[str, int]
) -> Check:
    """Compare the gradients of an original with the slopes of its loss: a wrong choice of the loss fails."""
    try:
        found = check(original, feeds, hints, seed=seed, dims=dims)
    except VerifyError as error:
        return Check(_NAME, SKIPPED, str(error))
    wrong = [f"{each.gradient!r} of {each.weight!r}" for each in found.weights if each.verdict == DISAGREES]
    if wrong:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        return Check(
            _NAME, FAILS, f"{wrong[0]}{more} is no slope of {found.loss!r}; inspect --check-gradients says more"
        )
    agreeing = count_agreeing(found.weights)
    detail = f"{agreeing} of {len(found.weights)} agree with {found.loss!r} in {found.dtype}"
    return Check(_NAME, HOLDS if agreeing else SKIPPED, detail)
