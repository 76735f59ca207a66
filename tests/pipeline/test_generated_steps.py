"""Steps that accumulate gradients, clip each of them, or leave a parameter unused: only the loss scale is new.

Set GRAPHSCALE_TEST_PROFILE=deep for twenty times as many.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.printer
import onnx_ir as ir
import pytest
from hypothesis import assume, note

import graphscale as gs
from tests.checks.linting.test_models import forget
from tests.conftest import HAS_TRAINING, Level
from tests.pipeline.test_property import assert_steps
from tests.random_cases import run_random_cases
from tests.random_graphs import Step, computed, random_presentation, random_step
from tests.tape.losses import random_loss
from tests.tape.optimizers import clip_by_norm, random_optimizer
from tests.tape.render import Presentation, Rendered
from tests.tape.trace import Tape, Var

PLAIN = Level.ORT_DISABLE_ALL
TARGETS = ("ort-training", "ort-training-cuda") if HAS_TRAINING else ("onnx", "ort-cuda")


def two_batches(tape: Tape) -> tuple[Var, Var, dict[Var, Var]]:
    """One network, forward and backward twice, and the sum or the mean of both gradients."""
    rows, columns, hidden, classes = (tape.choices.randint(2, 4) for _ in range(4))
    shapes = ((columns, hidden), (hidden,), (hidden, classes))
    weights = [tape.leaf(tape.numbers.normal(size=shape) / math.sqrt(shape[0]), "weight", True) for shape in shapes]
    activation = tape.choices.choice(("Tanh", "Sigmoid", "Relu"))
    losses = []
    for _ in range(2):
        x = tape.leaf(tape.numbers.normal(size=(rows, columns)), "input")
        a = tape.op(activation, tape.op("Add", tape.op("MatMul", x, weights[0]), weights[1]))
        y = tape.op("MatMul", a, weights[2])
        losses.append(random_loss(tape, y, weights, [a]))
    loss = tape.mul(tape.op("Add", *losses), 0.5)
    forward, found = frozenset(node.output for node in tape.nodes), []
    for each in losses:
        tape.backward(each)
        found.append({w: computed(tape, tape.cotangents[w]) for w in weights})
        tape.forward = forward
    sums = {w: tape.op("Add", found[0][w], found[1][w]) for w in weights}
    return y, loss, {w: tape.mul(total, 0.5) for w, total in sums.items()} if tape.flag() else sums


def accumulate(tape: Tape, gradients: dict[Var, Var]) -> dict[Var, Var]:
    """Add gradients to buffers; in half of the steps, apply and empty them where an input says so."""
    buffers = {w: tape.leaf(0.1 * tape.numbers.normal(size=w.shape), "state") for w in gradients}
    sums = {w: tape.op("Add", buffers[w], g) for w, g in gradients.items()}
    if tape.flag():
        return {buffers[w]: total for w, total in sums.items()}
    last = tape.leaf(np.asarray(tape.flag()), "input")
    emptied = {buffers[w]: tape.op("Where", last, 0.0, total) for w, total in sums.items()}
    stepped = random_optimizer(tape, sums)
    return emptied | {present: tape.op("Where", last, following, present) for present, following in stepped.items()}


def clip_each(tape: Tape, gradients: dict[Var, Var]) -> dict[Var, Var]:
    return random_optimizer(tape, {w: clip_by_norm(tape, {w: g})[w] for w, g in gradients.items()})


def with_unused_parameter(choices: random.Random) -> Step:
    """A parameter that no loss depends on: with a gradient of zeros, in a metric, or decayed alone."""
    step = random_step(choices)
    tape, kind = step.tape, choices.randrange(3)
    w = tape.leaf(tape.numbers.normal(size=(2, 3)), "weight")
    carried = {}
    if kind == 0:
        more = [tape.op("Expand", 0.0, np.asarray(w.shape)), tape.reduce("ReduceMean", w)]
    elif kind == 1 or not step.carried:
        more = [tape.reduce("ReduceMax", tape.op("Abs", w))]
    else:
        more = [tape.op("Sub", w, tape.mul(w, 0.0005))]
        carried = {w: more[0]}
    return dataclasses.replace(step, outputs=(*step.outputs, *more), carried=step.carried | carried)


STEPS: dict[str, Callable[[random.Random], Step]] = {
    "no feature": random_step,
    "gradients added up within a step": functools.partial(random_step, differentiate=two_batches),
    "gradients added up across steps": functools.partial(random_step, follow=accumulate),
    "clipping of each gradient": functools.partial(random_step, follow=clip_each),
    "an unused parameter": with_unused_parameter,
}


@pytest.mark.full
@pytest.mark.every_share
@pytest.mark.parametrize("name", STEPS)
def test_a_step_with(name: str) -> None:
    def holds(choices: random.Random) -> None:
        step = STEPS[name](choices)
        assume(step.gradients and step.is_tame())
        how = random_presentation(choices, step)
        if name == "gradients added up across steps" and how.weights == "initializer":
            how = dataclasses.replace(how, weights="both")  # else a gradient is added to a constant
        rendered = step.render(how)
        note(onnx.printer.to_text(rendered.model))
        check(step, rendered, choices)
        # A weight that is an initializer only cannot change: that is all that may be found in an original.
        found = {finding.code for finding in gs.lint(rendered.model).findings}
        assert found <= ({"GS501"} if how.weights == "initializer" and step.carried else set())

    run_random_cases(holds, 21, 24, f"a step with {name}", shared=True)


def check(step: Step, rendered: Rendered, choices: random.Random) -> None:
    model, scale = original(rendered.model), choices.choice([2.0, 2.0**10, 2.0**15])
    policy = gs.DynamicLossScale(scale)
    roles = all_roles(step, rendered) if gs.roles(model).open else {}
    result = gs.scale(model, policy, roles=roles)
    names = rendered.names
    carried = {(names[present], names[following]) for present, following in step.carried.items()}
    assert carried <= {(state.input, state.output) for state in result.report.state}
    assert step.tape.bare or result.report.coverage == (1.0 if step.tape.contractions else None), result.report.missed

    assert_steps(step, rendered, result, choices, scale)
    assert gs.strip(result.model).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    for scaled in (result, gs.scale(model, policy, roles=roles, target=choices.choice(TARGETS))):
        by_hand = gs.lint(forget(ir.from_proto(scaled.model)))
        assert gs.lint(scaled.model).findings == by_hand.findings == ()
        assert by_hand.loss_scale is not None and by_hand.gradients > 0
        report = gs.verify(model, scaled, runs=1, roles=roles)
        assert report.ok, report


def all_roles(step: Step, rendered: Rendered) -> dict[str, Any]:
    """A roles file with all that is known of a step."""
    names, gradients = rendered.names, set(step.gradients.values())
    others = [value for value in step.outputs if value not in {step.loss, *step.carried.values()}]
    return {
        "states": {names[following]: names[present] for present, following in step.carried.items()},
        "gradients": [names[value] for value in others if value in gradients],
        "metrics": [names[value] for value in others if value not in gradients],
    }


def original(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as onnx_ir writes it, so that what is stripped can be compared byte for byte."""
    return ir.to_proto(ir.from_proto(model))


@pytest.mark.full
def test_two_backward_passes_in_one_step() -> None:
    """Halved sums of gradients before a lerp of Adam, which one in thirty of these steps has: none is refused."""
    for seed in range(60):
        step = STEPS["gradients added up within a step"](random.Random(seed))
        if step.is_tame():
            rendered = step.render(Presentation())
            report = gs.scale(rendered.model, roles=step.answers(rendered)).report
            assert step.tape.bare or report.coverage == (1.0 if step.tape.contractions else None), (seed, report.missed)
