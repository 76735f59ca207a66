"""Changes of a scaled graph that change no result, and the kinds of damage that tests/frozen tries."""

from __future__ import annotations

import functools

import pytest

from benchmarks.mutants import judge, mutants
from benchmarks.mutation import KINDS, SAME, Kind
from benchmarks.mutation.damaged import Damaged
from benchmarks.mutation.scalings import INSIDE, Scaled

# One after the other, until one has a site.
GRAPHS = (
    ("pytorch/mlp_momentum", "onnx"),
    ("pytorch/mlp_momentum", INSIDE),
    ("pytorch/clip_by_value", "onnx"),
    ("pytorch/two_losses", "ort-training-cuda"),
    ("pytorch/two_losses", "ort-cuda"),
    ("pytorch/two_losses", "onnx"),
    ("ort/digits_mlp", "ort-training"),
    ("ort/gradbuilder_regression", "onnx"),
    ("ort/bce", "onnx"),
    ("jax/mlp_adam", "onnx"),
    ("jax/mlp_adamw_clip", "onnx"),
    ("jax/attention", "onnx"),
    ("pytorch/attention_tied", "onnx"),
    ("pytorch/mlp_gelu_layernorm", "onnx"),
    ("ort/conv", "onnx"),
    ("ort/activations", "onnx"),
    ("pytorch/attention_adamw_clip", "onnx"),
    ("ort/transformer", "onnx"),
    ("a wide step", "ort-cpu"),
    ("a narrow step", "ort-cpu"),
)

pytestmark = [pytest.mark.static, pytest.mark.training]

_scaled = functools.cache(Scaled)


def _find_graph(kind: Kind) -> tuple[str, str]:
    for name, target in GRAPHS:
        model = _scaled(name).model(target, kind.scaling)
        if model is not None and any(True for _ in kind.sites(Damaged(model))):
            return name, target
    raise AssertionError(f"none of these graphs has a site for {kind.name!r}")


@pytest.mark.full
@pytest.mark.parametrize("kind", SAME, ids=lambda kind: kind.name)
def test_changes_that_are_none(kind: Kind) -> None:
    name, target = _find_graph(kind)
    for mutant, original in mutants([name], [target], [kind], find=_scaled):
        verdict = judge(mutant, original, runs=0, lint=False)
        assert verdict.accepted == kind.accepted, verdict
        assert verdict.accepted or verdict.by == ("match",), verdict


def test_there_are_many_kinds() -> None:
    names = [kind.name for kind in (*KINDS, *SAME)]
    assert len({*names}) == len(names)
    assert (len(KINDS), len(SAME)) >= (200, 20)
