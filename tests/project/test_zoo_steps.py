"""The packed steps of models/zoo, one of each kind: the outcomes, the proposals and the refusals."""

import json

import onnx
import pytest

import graphscale as gs
from graphscale.analysis.roles.roles_file import roles_file
from graphscale.errors import LossError, UnsupportedModelError
from models.zoo import pack
from models.zoo.steps import is_aside
from tests.frozen.stored import read_table

NAMES = pack.names()
# `tests/frozen` has the outcome of each, and fails where one differs.
OUTCOMES = {name: row["outcome"] for name, row in read_table("zoo").items()}
ASKED = sorted(name for name, outcome in OUTCOMES.items() if outcome.startswith("asked"))
OWN_SCALE = {"field-credit-scoring.masters", "half-precision-mixer.adamw"}
IN_BODY = "let the gradients leave the body"
# Whole steps in the body of a loop.
REFUSED = {
    "jax-scanned-epoch.momentum": (UnsupportedModelError, IN_BODY),
    "steps-in-loop.shuffled": (UnsupportedModelError, IN_BODY),
    "steps-in-scan.momentum-names": (LossError, IN_BODY),
}


@pytest.mark.static
def test_no_role_is_wrong_and_few_are_asked_about() -> None:
    assert OUTCOMES.keys() == {*NAMES}
    assert "wrong" not in OUTCOMES.values()
    assert {name for name, outcome in OUTCOMES.items() if outcome == "refused"} - REFUSED.keys() <= OWN_SCALE
    assert len(ASKED) <= 0.08 * len(NAMES)
    assert sum(OUTCOMES[name] != "asked, proposal right" for name in ASKED) <= 2


@pytest.mark.static
def test_fresh_steps() -> None:
    outcomes = {name: row["outcome"] for name, row in read_table("fresh").items()}
    assert "wrong" not in outcomes.values()
    assert sum(outcome.startswith("asked") for outcome in outcomes.values()) <= 0.14 * len(outcomes)


@pytest.mark.full
@pytest.mark.static
@pytest.mark.parametrize("name", ASKED)
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
