"""Property tests over random choices: the same cases in each run, and thousands of new ones in a deep one.

Set GRAPHSCALE_TEST_PROFILE=deep for the new ones: hypothesis draws and shrinks them. Otherwise a case is a seed, and
neither a release of hypothesis nor an edit of the code, from which it takes constants, makes another graph of it. The
quick tier runs the first of them, the full tier all, or every sixth with GRAPHSCALE_TEST_SHARE=1/6.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st

from tests.tiers import read_share

DEEP = os.environ.get("GRAPHSCALE_TEST_PROFILE") == "deep"
# The number of the only case to run.
ALONE = os.environ.get("GRAPHSCALE_TEST_CASE")
if DEEP and ALONE is not None:
    raise pytest.UsageError(
        "GRAPHSCALE_TEST_CASE says which case to run, and a deep run has no numbered cases; unset one"
    )


# The quick tier runs one case in so many.
QUICK_SHARE = 60
# For a test that runs its seeds by `run_random_cases`, shared.
FULL = [pytest.mark.full, pytest.mark.every_share]


def run_random_cases(
    test: Callable[[random.Random], None], least: int, tried: int, name: str, shared: bool = False
) -> None:
    """Run a test of `choices` on `tried` cases, where `assume` may set aside all but `least`.

    Args:
        test: the test.
        least: number of cases that must count; a deep run looks for twenty times as many.
        tried: number of seeds.
        name: a name for the seeds.
        shared: whether to run the seeds of one share alone.
    """
    counted = 0
    numbers = range(tried)
    if shared and not DEEP:
        number, count = read_share()
        numbers = numbers[(number - 1) % tried :: count]
        # As many cases may be set aside in one share as in all.
        least = max(least - tried + len(numbers), 1)

    @functools.wraps(test)
    def case(choices: random.Random | int) -> None:
        nonlocal counted
        if isinstance(choices, int):
            seed = f"{name}-{choices}"
            note(f"choices = random.Random({seed!r}); GRAPHSCALE_TEST_CASE={choices} runs this case alone")
            choices = random.Random(seed)
        test(choices)
        counted += 1

    profile = settings(
        max_examples=20 * least,
        derandomize=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.reuse, Phase.generate, Phase.shrink) if DEEP else (Phase.explicit,),
        report_multiple_bugs=False,
    )
    run = profile(given(choices=st.randoms(use_true_random=False))(case))
    for case_number in () if DEEP else reversed(numbers if ALONE is None else [int(ALONE)]):
        run = example(choices=case_number)(run)
    run()
    # That nothing is missing silently: hypothesis sets cases aside without a word.
    if ALONE is not None:
        assert counted, f"case {ALONE} is set aside"
    else:
        assert counted >= least, f"{counted} cases count, fewer than {least}: the others are set aside"


def random_cases(least: int, tried: int) -> Callable[[Callable[[random.Random], None]], Callable[..., None]]:
    """Run a test by `run_random_cases`: in the quick tier on the first cases, in the full one on all."""
    few = max(tried // QUICK_SHARE, 1)
    # As many cases may be set aside among the first as among all.
    tiers = [
        pytest.param(max(few - (tried - least), 1), few, id="some"),
        pytest.param(least, tried, id="all", marks=FULL),
    ]
    if DEEP or ALONE is not None:
        tiers = [pytest.param(least, tried)]

    def decorate(test: Callable[[random.Random], None]) -> Callable[..., None]:
        @pytest.mark.parametrize(("least", "tried"), tiers)
        def run(least: int, tried: int) -> None:
            run_random_cases(test, least, tried, test.__name__, shared=tried > few)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
