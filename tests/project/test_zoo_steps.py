"""The roles of the packed steps of models/zoo, one of each kind, against the truth of their scripts."""

import json

import onnx
import pytest

import graphscale as gs
from graphscale.analysis.roles.answers import roles_file
from graphscale.errors import LossError, UnsupportedModelError
from models.zoo import pack, trial
from models.zoo.steps import is_aside

NAMES = pack.names()
# Tensors of one type under scrambled names in a shuffled order, weights beside masks of their type, rates in use,
# codebooks, batches that leave the graph, losses with stopped gradients.
ASKED = {
    "accelerated-proximal.square", "codebook-revival.residual", "compensated-summation.regression",
    "field-depth-regression.momentum", "group-robust.shuffled",
    "jax-citation-graph.rprop", "jax-codebook-revival.adam", "jax-task-weights.variation", "keras-adafactor.square",
    "keras-option-weight-average-overwriting.square", "lab-quantile-returns.soft-target",
    "normalised-batch-output.gradients",
    "optax-adafactor.square", "optax-adopt.square", "optax-backtracking.square", "optax-cocob.square",
    "optax-dog.square", "optax-mechanic.square", "optax-optimistic-adam.square",
    "optax-optimistic-gradient-descent.square", "optax-prodigy.square", "optax-sm3.square",
    "pruning-mask.weights",
    "torch-rprop.square", "wrap-measured.square", "wrap-mechanize.square", "wrap-multi-steps-skipping.square",
    "wrap-plateau.square", "wrap-skip-large.square",
}  # fmt: skip
IN_BODY = "let the gradients leave the body"
# Whole steps in the body of a loop.
REFUSED = {
    "jax-scanned-epoch.momentum": (UnsupportedModelError, IN_BODY),
    "steps-in-loop.shuffled": (UnsupportedModelError, IN_BODY),
    "steps-in-scan.momentum-names": (LossError, IN_BODY),
}


@pytest.mark.full
@pytest.mark.static
@pytest.mark.parametrize("name", sorted(set(NAMES) - REFUSED.keys()))
def test_roles(name: str) -> None:
    content, truth = pack.read(name)
    model = onnx.load_from_string(content)
    found = trial.judge(name, model, gs.inspect(model), truth)
    assert found.outcome.partition(",")[0] == ("asked" if name in ASKED else "right"), found.reason


@pytest.mark.full
@pytest.mark.static
@pytest.mark.parametrize("name", sorted(ASKED))
def test_proposals_are_taken_as_they_are(name: str) -> None:
    model = onnx.load_from_string(pack.read(name)[0])
    assert gs.scale(model, roles=json.loads(roles_file(gs.inspect(model).roles))).report.proved


@pytest.mark.static
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        gs.inspect(onnx.load_from_string(pack.read(name)[0]))


@pytest.mark.static
def test_each_kind_is_packed_once_and_none_that_is_set_aside() -> None:
    kinds = [name.partition(".")[0] for name in NAMES]
    assert len(kinds) == len(set(kinds)) > 200
    assert not any(map(is_aside, kinds))
