"""Small training steps as files, and the questions that the tests ask about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.reference

import graphscale as gs
from graphscale.errors import RolesError
from tests.build import parse
from tests.conftest import Arrays, Level, assert_all_same_bits, assert_same_bits, initial_values, run_once

FOLDER = Path(__file__).parent
FACTOR = 1024.0


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.onnxtxt").read_text(encoding="utf-8")


def read(name: str) -> onnx.ModelProto:
    return parse(text_of(name))


def proposals(model: onnx.ModelProto) -> dict[str, Any]:
    """The roles of the outputs, open ones as they are proposed, as the content of a roles file."""
    outputs = [entry for entry in gs.roles(model) if entry.kind == "output"]
    fields = {"losses": "loss", "metrics": "metric", "gradients": "gradient"}
    content: dict[str, Any] = {f: [e.name for e in outputs if e.role == role] for f, role in fields.items()}
    return {**content, "states": pairs_of(model)}


def pairs_of(model: onnx.ModelProto) -> dict[str, str]:
    """The pairs of carried state, open ones as they are proposed: `{output: input}`."""
    return {e.name: e.pair for e in gs.roles(model) if e.kind == "output" and e.pair is not None}


def losses_of(model: onnx.ModelProto) -> set[str]:
    return {entry.name for entry in gs.roles(model) if entry.kind == "output" and entry.role == "loss"}


def scale(model: onnx.ModelProto, loss_scale: Any = "dynamic") -> gs.ScaledModel:
    """Scale a step; if a role is open, with the proposals."""
    try:
        return gs.scale(model, loss_scale)
    except RolesError:
        return gs.scale(model, loss_scale, roles=proposals(model))


def values(model: onnx.ModelProto, names: Iterable[str], feeds: Arrays) -> Arrays:
    """Return values of the inside of a step, and its outputs, in one run without optimizations."""
    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    probes = {name: f"probe.{name}" for name in names}
    for name, probe in probes.items():
        probed.graph.node.append(onnx.helper.make_node("Cast", [name], [probe], to=onnx.TensorProto.FLOAT))
        probed.graph.output.append(onnx.helper.make_tensor_value_info(probe, onnx.TensorProto.FLOAT, None))
    outputs, _ = run_once(probed, feeds, Level.ORT_DISABLE_ALL)
    return {name: outputs[probe] for name, probe in probes.items()} | outputs


def assert_enters(model: onnx.ModelProto, feeds: Arrays, forward: Collection[str], backward: Collection[str]) -> None:
    """A scale multiplies the values of the backward pass, and changes no value of the forward pass and no output."""
    before = values(model, (*forward, *backward), feeds)
    after = values(scale(model, FACTOR).model, (*forward, *backward), feeds)
    assert_all_same_bits(after, {name: before[name] for name in forward})
    for name in backward:
        assert before[name].any(), name
        assert_same_bits(after[name], np.float32(FACTOR) * before[name], name)
    assert_all_same_bits(after, {value.name: before[value.name] for value in model.graph.output})


def run_faithfully(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Arrays:
    """Run a step where float16 is float16: the CPU provider of ONNX Runtime computes it in float32."""
    names = [value.name for value in model.graph.output]
    with np.errstate(all="ignore"):
        outputs = onnx.reference.ReferenceEvaluator(model).run(names, dict(feeds))
    return dict(zip(names, map(np.asarray, outputs), strict=True))


def assert_skipped(result: gs.ScaledModel, feeds: Arrays, outputs: Arrays) -> None:
    """A step was not applied: the flag is False, and each state of the original keeps its value."""
    assert not outputs["all_finite"]
    before = {**initial_values(result.model), **feeds}
    for state in result.report.state:
        if state.input not in ("current_loss_scale", "good_steps"):
            assert_same_bits(outputs[state.output], before[state.input], state.input)


def assert_nan_is_skipped(result: gs.ScaledModel, feeds: Arrays, *names: str) -> None:
    """A NaN in any of these inputs, one at a time, changes no state."""
    for name in names:
        poisoned = {**feeds, name: feeds[name].copy()}
        poisoned[name].flat[0] = np.nan
        assert_skipped(result, poisoned, run_once(result.model, poisoned)[0])


def assert_trains(model: onnx.ModelProto, states: Mapping[str, str], feeds: Arrays, steps: int = 3) -> None:
    """A session trains a step as a plain loop over its pairs `{output: input}` does."""
    result, plain = scale(model), dict(feeds)
    carried = {state.input for state in result.report.state} & feeds.keys()
    batch = {name: array for name, array in feeds.items() if name not in carried}
    with gs.Session(result, state={name: feeds[name] for name in carried}) as session:
        for _ in range(steps):
            expected, _ = run_once(model, plain)
            plain |= {name: expected[output] for output, name in states.items()}
            actual = session.step(batch)
            np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5)
        after = {**batch, **session.state_dict()}
    for name in states.values():
        np.testing.assert_allclose(after[name], plain[name], rtol=1e-5, err_msg=name)
