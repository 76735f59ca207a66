"""Random small training graphs, scaled: they keep their gradients, to the last bit.

The same few hundred graphs each time; GRAPHSCALE_TEST_PROFILE=deep draws thousands of new ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.printer
from hypothesis import assume, event, note

import graphscale as gs
from graphscale.errors import SeedNotFoundError
from tests.conftest import Arrays, Level, assert_all_same_bits, assert_same_bits, run_once
from tests.passes.casting.rounding import with_outputs
from tests.random_cases import random_cases
from tests.random_graphs import Step, numbers_of, random_presentation, tame_step
from tests.tape.evaluate import evaluate
from tests.tape.render import Presentation, Rendered
from tests.tape.trace import Var

SCALE = np.float32(1024)
PLAIN, OPTIMIZED = Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_BASIC


@random_cases(300, tried=310)
def test_generated_gradients_are_gradients(choices: random.Random) -> None:
    """The generator itself: its gradients against finite differences, along a random direction."""
    step = tame_step(choices)
    numbers = np.random.default_rng(0)
    direction = {w: numbers.normal(size=w.shape) for w in step.gradients}
    slope = sum(float((direction[w] * g.array).sum()) for w, g in step.gradients.items())
    small = 1e-6
    ahead, behind = (_loss_at(step, {w: w.array + t * d for w, d in direction.items()}) for t in (small, -small))
    np.testing.assert_allclose((ahead - behind) / (2 * small), slope, rtol=1e-4, atol=1e-4)


def _loss_at(step: Step, moved: Mapping[Var, np.ndarray]) -> float:
    arrays = dict(moved)
    for node in step.tape.nodes:
        if node.output in step.tape.forward:
            operands = [arrays.get(value, value.array) for value in node.inputs]
            arrays[node.output] = evaluate(node.op_type, operands, node.attributes)
    return float(arrays[step.loss])


@random_cases(500, tried=510)
def test_fixed_scale_keeps_every_bit(choices: random.Random) -> None:
    """Loss and state are found; each output has the bits it had; every backward contraction runs 1024 times larger."""
    step, rendered, answers = _drawn(choices)
    given_bytes = rendered.model.SerializeToString(deterministic=True)
    result = gs.scale(rendered.model, float(SCALE), roles=answers)
    again = gs.scale(rendered.model, float(SCALE), roles=answers)
    assert rendered.model.SerializeToString(deterministic=True) == given_bytes
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)

    _assert_found(step, rendered, result.report)
    feeds = step.sample(rendered)
    expected = _run(rendered.model, feeds)
    assert_all_same_bits(_run(result.model, feeds), expected)
    if choices.random() < 0.5:
        # The optimizer may move constants through products, which rounds differently: see that it did not.
        optimized = _run(rendered.model, feeds, OPTIMIZED)
        if all(optimized[name].tobytes() == array.tobytes() for name, array in expected.items()):
            assert_all_same_bits(_run(result.model, feeds, OPTIMIZED), expected)
    _assert_covered(step, rendered, result, feeds)
    event(f"{len(result.report.places)} places")


def _assert_found(step: Step, rendered: Rendered, report: gs.Report) -> None:
    names = rendered.names
    assert report.loss == names[step.loss]
    assert {(s.input, s.output) for s in report.state} == {(names[i], names[o]) for i, o in step.carried.items()}
    gradients = {names[g] for g in step.gradients.values()}
    assert {g.value for g in report.gradients if g.output} <= gradients
    forward = {names[value] for value in step.tape.forward}
    assert not {g.value for g in report.gradients} & forward


def _assert_covered(step: Step, rendered: Rendered, result: gs.ScaledModel, feeds: Mapping[str, np.ndarray]) -> None:
    report = result.report
    if step.tape.bare:  # A target is a cotangent: it may be left out, but not silently.
        assert all(any(missed in warning for warning in report.warnings) for missed in report.missed)
        return
    assert report.coverage == (1.0 if step.tape.contractions else None), report.missed
    before = _run_all(rendered.model, feeds)
    after = _run_all(result.model, feeds)
    for value in step.tape.contractions:
        name = rendered.names[value]
        scaled = after.get(f"{name}.scaled", after[name])
        np.testing.assert_array_equal(scaled, before[name] * SCALE, err_msg=f"contraction {name} is not scaled")


@random_cases(500, tried=510)
def test_dynamic_scale_skips_nonfinite_steps(choices: random.Random) -> None:
    step, rendered, answers = _drawn(choices)
    assert_steps(step, rendered, gs.scale(rendered.model, roles=answers), choices)


def assert_steps(
    step: Step, rendered: Rendered, result: gs.ScaledModel, choices: random.Random, initial: float = 2.0**15
) -> None:
    """A finite step is the one without scaling; a step with a non-finite gradient changes the scale and no state."""
    feeds = step.sample(rendered)
    expected, actual = (_run(model, feeds) for model in (rendered.model, result.model))
    assert_all_same_bits(actual, expected)
    finite, scale = result.model.graph.output[-1].name, _next_scale(result)
    assert actual[finite]
    assert actual[scale] == initial

    poisoned = _poison(step, rendered, feeds, choices)
    before = _run_all(rendered.model, poisoned)
    after = _run(result.model, poisoned)
    harmless = all(np.isfinite(before[rendered.names[g]]).all() for g in step.gradients.values())
    event(f"harmless: {harmless}")
    assert bool(after[finite]) == harmless
    assert after[scale] == (initial if harmless else initial / 2)
    if not harmless:
        for state, following in step.carried.items():
            old = poisoned.get(rendered.names[state], numbers_of(state))
            assert_same_bits(after[rendered.names[following]], old, rendered.names[state])


def _next_scale(result: gs.ScaledModel) -> str:
    name = next(s.input for s in result.report.state if s.input.startswith("current_loss_scale"))
    return f"{name}.next"


def _poison(
    step: Step, rendered: Rendered, feeds: Mapping[str, np.ndarray], choices: random.Random
) -> dict[str, np.ndarray]:
    """An Inf or a NaN in one number of the batch."""
    exposed = [v for v in step.leaves if v.kind == "input" and v.shape and v.array.dtype.kind == "f"]
    if not exposed:
        return dict(feeds)
    name = rendered.names[choices.choice(exposed)]
    array = feeds[name].copy()
    array.flat[choices.randrange(array.size)] = choices.choice((np.inf, -np.inf, np.nan))
    return {**feeds, name: array}


@random_cases(300, tried=310)
def test_presentation_does_not_matter(choices: random.Random) -> None:
    """Names, order, shared or copied constants: the same gradients and state are found; without types, or proposed."""
    step = tame_step(choices)
    how = random_presentation(choices, step)
    plain = Presentation(weights=how.weights)
    assert _findings(step, how, how.value_info) == _findings(step, plain, how.value_info)


def _findings(step: Step, how: Presentation, certain: bool) -> tuple[object, ...]:
    rendered = step.render(how)
    note(onnx.printer.to_text(rendered.model))
    values = {name: value for value, name in rendered.names.items()}
    try:
        report = gs.inspect(rendered.model, roles=step.answers(rendered))
    except SeedNotFoundError as error:
        if not _has_no_contraction(error):
            raise
        return ("refused",)
    return (
        values[report.loss],
        {values[gradient.value] for gradient in report.gradients},
        {
            (values.get(entry.pair, entry.pair), values[entry.name])
            for entry in report.roles
            if entry.kind == "output" and entry.pair and (entry.certain or not certain)
        },
        report.coverage,
        report.contractions,
    )


def _drawn(choices: random.Random) -> tuple[Step, Rendered, dict[str, Any]]:
    """A step, written down, and the roles that graphscale asks about."""
    step = tame_step(choices)
    rendered = step.render(random_presentation(choices, step))
    note(onnx.printer.to_text(rendered.model))
    answers: dict[str, Any] = {}
    try:
        answers = step.answers(rendered)
    except SeedNotFoundError as error:
        assume(not _has_no_contraction(error))
    event(f"{sum(map(len, answers.values()))} roles asked about")
    return step, rendered, answers


def _has_no_contraction(error: SeedNotFoundError) -> bool:
    """Return whether the scale could enter at the gradients themselves alone, which graphscale refuses."""
    return "no contraction that reads a cotangent" in str(error)


def _run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], level: Level = PLAIN) -> Arrays:
    return run_once(model, feeds, level)[0]


def _run_all(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """The value of every result of every node."""
    return _run(with_outputs(model, [name for node in model.graph.node for name in node.output]), feeds)
