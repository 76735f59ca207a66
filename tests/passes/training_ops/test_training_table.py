"""The table of training operators: all that onnxruntime-training emits has a standard form, or a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import UnsupportedModelError
from graphscale.passes import LowerTrainingOps
from graphscale.passes.lower_training_ops import FORMULAS
from graphscale.passes.lower_training_ops.without_form import WITHOUT_FORM
from tests.build import parse
from tests.passes.training_ops.emitted_operators import OPERATORS, load_forward_operators, read_emitted, read_graphs
from tests.passes.training_ops.forward.forward_patterns import PATTERNS
from tests.passes.training_ops.forward.node import FORWARD
from tests.passes.training_ops.training_table import ERRORS, PAGE, fill_page

load_forward_operators()
# Operators of `generate_artifacts` for BatchNormalization, GRU and LSTM; and names for definitions of users.
REWRITTEN = {"BatchNormInternal", "GRUTraining", "LSTMTraining"}
DEFINED_BY_USERS = {"ATen", "ExternalGradient"}


@pytest.mark.static
def test_each_emitted_operator_has_a_form_or_a_reason() -> None:
    known = {name for _, name in {*FORMULAS, *WITHOUT_FORM}}
    assert set(read_emitted().sources) <= known
    assert not FORMULAS.keys() & WITHOUT_FORM.keys()


@pytest.mark.static
def test_each_differentiable_operator_is_tried() -> None:
    tried = {case.op_type for case in FORWARD.values()} | PATTERNS.keys() | REWRITTEN | DEFINED_BY_USERS
    assert set(read_emitted().differentiable) <= tried
    given_up = {FORWARD[name].op_type for name in read_emitted().undone}
    assert given_up == {"Add", "Mul", "ReduceL2", "ReduceLogSumExp", "Sub"}


@pytest.mark.full
@pytest.mark.static
def test_gradient_graphs_are_lowered() -> None:
    refused = set()
    for name, model in read_graphs().items():
        try:
            lowered = gs.lower_training_ops(model).model
        except UnsupportedModelError:
            refused.add(name)
        else:
            assert not LowerTrainingOps.applies(ir.from_proto(lowered)), name
    assert refused == {name for name in read_graphs() if FORWARD[name].is_refused}


@pytest.mark.static
def test_a_reason_is_part_of_the_message() -> None:
    header = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
    model = parse(f"{header} one (float[3] x) => (float[3] y) {{ y = com.microsoft.NcclAllReduce(x) }}")
    with pytest.raises(
        UnsupportedModelError, match=r"NcclAllReduce, [^\n]+: it exchanges values with other processes;"
    ):
        gs.lower_training_ops(model)


@pytest.mark.full
@pytest.mark.static
def test_page() -> None:
    command = "python -m tests.passes.training_ops.training_table writes it"
    assert PAGE.read_text(encoding="utf-8") == fill_page(), command
    errors = json.loads(ERRORS.read_text())["errors"]
    assert {name.removeprefix("ai.onnx::") for name in errors} == {name for _, name in FORMULAS}
    assert max(errors.values()) <= 1e-5


@pytest.mark.training
@pytest.mark.full
def test_record(tmp_path: Path) -> None:
    # The builder ends its process in some cases: it runs in others, which fork from one without sessions.
    command = [sys.executable, "-m", "tests.passes.training_ops.record_emitted", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[3])
    assert (tmp_path / OPERATORS.name).read_text() == OPERATORS.read_text()
