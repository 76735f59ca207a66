"""The page on the life of a gradient: its files exist, and its nodes are those of the scaled model."""

from __future__ import annotations

import re

import onnx
import pytest

import graphscale as gs
from tests.conftest import MODELS, ROOT

pytestmark = pytest.mark.static

PAGE = (ROOT / "docs/project/life-of-a-gradient.md").read_text(encoding="utf-8")


def test_the_files_exist() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PAGE)) - {"graphscale/", "tests/operators"}
    assert named
    assert [name for name in named if not (ROOT / "graphscale" / name).exists()] == []


def test_the_nodes_are_those_of_the_scaled_model() -> None:
    model = gs.scale(onnx.load(MODELS / "pytorch/mlp_momentum.onnx")).model
    assert isinstance(model, onnx.ModelProto)
    nodes = {node.output[0]: node for node in model.graph.node}
    written = re.findall(r"([\w.]+) = (\w+)\(([\w., ]+)\)", PAGE.partition("## How it is rewritten")[2])
    assert len(written) == 3
    for output, operator, operands in written:
        assert nodes[output].op_type == operator
        assert list(nodes[output].input) == operands.split(", ")
    assert [value.value for value in gs.inspect(model).places] == ["ones_like"]
