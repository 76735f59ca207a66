"""The roles of the packed steps of models/zoo against the truth of their scripts: no certain answer is wrong."""

import onnx
import pytest

import graphscale as gs
from graphscale.errors import GraphscaleError
from models.zoo import pack, trial
from models.zoo.steps import is_aside

NAMES = pack.names()


@pytest.mark.static
@pytest.mark.sample(10)
@pytest.mark.parametrize("name", NAMES)
def test_no_certain_role_is_wrong(name: str) -> None:
    content, truth = pack.read(name)
    model = onnx.load_from_string(content)
    try:
        report = gs.inspect(model)
    except GraphscaleError:
        return  # a refusal is no wrong answer
    found = trial.judge(name, model, report, truth)
    assert found.outcome != "wrong", found.reason


@pytest.mark.static
def test_each_kind_is_packed_once_and_none_that_is_set_aside() -> None:
    kinds = [name.partition(".")[0] for name in NAMES]
    assert len(kinds) == len(set(kinds)) > 200
    assert not any(map(is_aside, kinds))
