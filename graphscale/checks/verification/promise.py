"""The promises of a scaled file that follow from nothing in the original: its policy, types, and kept states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.verify_report import FAILS, HOLDS, Check
from graphscale.errors import InvalidLossScaleError, VerifyError, reporting
from graphscale.policy.loss_scale import DynamicLossScale, LossScale, get_policy
from graphscale.policy.observed_rule import ObservedLossScale
from graphscale.process.summary import few

__all__ = ["compare_expectations", "describe_promises", "find_applied", "parse_expectation"]

ANY_DYNAMIC = "dynamic"


def find_applied(pair: Pair) -> str:
    """Return the policy as a text if it applies some steps with a non-finite gradient; else nothing."""
    policy = pair.step.scale.policy
    accepts = isinstance(policy, DynamicLossScale) and policy.rule.on_stuck == "accept"
    return repr(policy) if accepts or pair.step.all_finite is None else ""


def describe_promises(pair: Pair) -> Iterator[str]:
    """Describe what the file promises, a sentence each."""
    applied = find_applied(pair)
    what = "applied" if pair.step.all_finite is None else "applied once the scale is stuck" if applied else "skipped"
    yield f"a step with a non-finite gradient is {what}: {pair.step.scale.policy!r}"
    if isinstance(pair.step.scale.policy, ObservedLossScale) and pair.step.scale.policy.rows:
        yield f"its update rule gives: {pair.step.scale.policy.table}"
    if pair.dtype is not None:
        yield f"the file computes in {pair.dtype} where the original computes in float32"
    if pair.kept:
        yield f"a skipped step changes {few(sorted(pair.kept))} all the same"


def parse_expectation(policy: Any) -> LossScale | str | None:
    """Return an expected policy, or "dynamic" for all that skip each step with a non-finite gradient.

    Raises:
        VerifyError: it is no policy.
    """
    if policy is None or policy == ANY_DYNAMIC:
        return policy  # type: ignore[no-any-return]
    with reporting(VerifyError, "the expected policy", InvalidLossScaleError):
        return get_policy(policy)


def compare_expectations(pair: Pair, policy: LossScale | str | None, dtype: str | None) -> Iterator[Check]:
    """Yield a check for each expectation of the user.

    Args:
        pair: both graphs.
        policy: the expected policy; "dynamic" for each dynamic one that skips all steps with a non-finite gradient.
        dtype: the expected type of autocast; "float32" for none.
    """
    if policy is not None:
        found = pair.step.scale.policy
        is_fit = (
            isinstance(found, DynamicLossScale) and not find_applied(pair)
            if isinstance(policy, str)
            else (type(found), found.get_config()) == (type(policy), policy.get_config())
        )
        detail = repr(found) if is_fit else f"the file has {found!r}, and {policy!r} was expected"
        yield Check("policy as expected", HOLDS if is_fit else FAILS, detail, True)
    if dtype is not None:
        own = pair.dtype or "float32"
        detail = own if own == dtype else f"the file computes in {own}, and {dtype} was expected"
        yield Check("types as expected", HOLDS if own == dtype else FAILS, detail, True)
