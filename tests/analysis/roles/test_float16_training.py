"""A hundred steps in emulated float16 with two bad batches, against the float32 step without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.passes import Autocast
from tests.analysis.roles.steps import update_step
from tests.build import LINEAR, feeds_for
from tests.conftest import Arrays, run_once
from tests.expressions import nodes

DESCENT = "u = dw * fast; w_next = w - u\n"
QUEUED = LINEAR.replace("loss =", "error =") + nodes(
    "z = queue @ w; loss = error + ReduceMean(z * z, keepdims=0) * tiny"
)


def descent(text: str = "", inputs: str = "", outputs: str = "", constants: str = "", **more: str) -> onnx.ModelProto:
    """A step whose gradients are mostly too small for float16."""
    constants = f"float fast = {{400000}}{constants and ', '}{constants}"
    return update_step(text, inputs, outputs, constants, **{"update": DESCENT, **more})


STEPS = {
    "parameter norm": descent("norm = ReduceL2(w_next, keepdims=0)", outputs="float norm"),
    "validation loss": descent(
        "e = other @ w - t; validation = ReduceMean(e * e, keepdims=0)", "float[8,4] other", "float validation"
    ),
    "masters": descent(
        "half_next = Cast(w_next, to=10)",
        "float16[4,3] half",
        forward="wide = Cast<to = 1>(half)\n" + LINEAR.replace("x, w", "x, wide"),
    ),
    "queue": descent(
        "queue_next = Concat(x, Slice(queue, axes, last), axis=0)",
        "float[12,4] queue",
        constants="int64[1] last = {4}, float tiny = {0.001}, float tiny_slope = {0.00005555556}",
        forward=QUEUED,
        update="pull = queue.T @ z; dq = pull * tiny_slope; u = (dw + dq) * fast; w_next = w - u\n",
    ),
}


BAD = (30, 60)


def batches() -> Iterator[Arrays]:
    """A hundred batches, two of them infinite."""
    random = np.random.default_rng(0)
    target = random.normal(size=(4, 3))
    for i in range(100):
        x, other = (random.normal(0, 0.0003, (8, 4)).astype(np.float32) for _ in range(2))
        spoiled = np.float32(np.inf if i in BAD else 1)
        yield {"x": x * spoiled, "t": (x @ target).astype(np.float32), "other": other}


def trained_unscaled(model: onnx.ModelProto, states: Mapping[str, str], values: Arrays) -> Arrays:
    """The states after the good batches, each run by the step itself; `states` by their next values."""
    names = {value.name for value in model.graph.input}
    for i, batch in enumerate(batches()):
        if i not in BAD:
            feeds = {name: array for name, array in (batch | values).items() if name in names}
            after, _ = run_once(model, feeds)
            values = {state: after[output] for output, state in states.items()}
    return values


@pytest.mark.full
@pytest.mark.parametrize("name", STEPS)
def test_a_hundred_steps(name: str) -> None:
    model = STEPS[name]
    states = {entry.name: entry.pair for entry in gs.roles(model) if entry.kind == "output" and entry.pair}
    inputs = {value.name: array * 0 for value, array in zip(model.graph.input, feeds_for(model).values(), strict=True)}
    start = {state: inputs[state] for state in states.values()}
    expected = trained_unscaled(model, states, start)

    mixed = Autocast(emulate=True)
    session = gs.Session(gs.scale(model, gs.DynamicLossScale(2**15), autocast=mixed), state=start)
    fed = inputs.keys() - start.keys()
    finite = [session.step({n: a for n, a in batch.items() if n in fed})["all_finite"] for batch in batches()]
    assert [i for i, whole in enumerate(finite) if not whole] == list(BAD)
    actual = session.state_dict()
    assert {state: _far(actual[state], array) for state, array in expected.items() if _far(actual[state], array)} == {}
    # Without the scale the small gradients are rounded away.
    assert _far(trained_unscaled(gs.autocast(model, emulate=True).model, states, start)["w"], expected["w"])


def _far(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest number; 0 below two hundredths."""
    share = np.abs(one.astype(float) - other).max() / np.abs(other).max()
    return 0.0 if share < 0.02 else float(share)
