"""Changes of a scaled graph that change no result; tests/frozen tries the kinds of damage."""

from __future__ import annotations

import functools

import pytest

from benchmarks.mutants import judge, mutants
from benchmarks.mutation import KINDS, SAME, Kind
from benchmarks.mutation.scalings import INSIDE, Scaled

pytestmark = [pytest.mark.static, pytest.mark.training]

# One after the other, until one has a site.
GRAPHS = ["pytorch/mlp_momentum", "jax/mlp_adam", "ort/digits_mlp", "ort/transformer"]
_scaled = functools.cache(Scaled)


@pytest.mark.full
@pytest.mark.parametrize("kind", SAME, ids=lambda kind: kind.name)
def test_changes_that_are_none(kind: Kind) -> None:
    verdict = judge(*next(mutants(GRAPHS, ["onnx", INSIDE], [kind], find=_scaled)), runs=0, lint=False)
    assert verdict.accepted == kind.accepted, verdict
    assert verdict.accepted or verdict.by == ("match",), verdict


def test_there_are_many_kinds() -> None:
    names = [kind.name for kind in (*KINDS, *SAME)]
    assert len({*names}) == len(names)
    assert (len(KINDS), len(SAME)) >= (200, 20)
