"""Mutation testing of the rewrite, a part of `benchmarks/mutants.py`: every kind of damage is noticed."""

from __future__ import annotations

import pytest

from benchmarks.mutants import INSIDE, judge, kinds_with_sites, mutants
from benchmarks.mutations import KINDS, Kind

# Each with the kinds of damage to try, by a part of their names; all of them for the first three.
GRAPHS = {
    ("pytorch/clip_by_value", "onnx"): ("",),
    ("pytorch/mlp_momentum", INSIDE): ("",),
    ("pytorch/two_losses", "ort-training-cuda"): ("",),
    ("pytorch/two_losses", "onnx"): ("shared", "one place less"),
    ("ort/digits_mlp", "ort-training"): ("accumulator", "add 0.0", "write", "assigning"),
    ("jax/mlp_adam", "onnx"): ("counter",),
}


def kinds_for(name: str, target: str) -> list[Kind]:
    return [kind for kind in KINDS if any(text in kind.name for text in GRAPHS[name, target])]


@pytest.mark.sample(1)
@pytest.mark.training
@pytest.mark.parametrize(("name", "target"), GRAPHS, ids=lambda value: value)
def test_nothing_survives(name: str, target: str) -> None:
    survivors = []
    for mutant, original in mutants([name], [target], kinds_for(name, target)):
        verdict = judge(mutant, original)
        if mutant.harmless is None and not verdict.by:
            survivors.append(str(mutant))
        if mutant.harmless is not None:
            assert not verdict.by, f"{mutant}: {verdict.why}"
    assert not survivors


@pytest.mark.full
@pytest.mark.training
def test_every_kind_has_a_site() -> None:
    """In one of these graphs, at least; and there are as many kinds as there should be."""
    found: set[str] = set()
    for name, target in GRAPHS:
        found |= kinds_with_sites(name, target, kinds_for(name, target))
    assert found == {kind.name for kind in KINDS}
    assert len(KINDS) >= 40
