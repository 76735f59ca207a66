"""Wrong graphs with right results on random feeds: verify rejects each, and names the node or the claim."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from benchmarks.mutants import Mutant, mutants
from benchmarks.mutation import KINDS
from benchmarks.mutation.scalings import Scaled
from graphscale.checks.verification import verify
from graphscale.files import saving
from tests.build import linear_step
from tests.cli.command import graphscale
from tests.conftest import MODELS

pytestmark = pytest.mark.static

GRAPH, STARTS = "translation", "initial values"
METADATA = "metadata of the scaling"
MOMENTUM, ADAM, SYMBOLIC = "pytorch/mlp_momentum", "jax/mlp_adam", "ort/bce"

# By kinds of damage in benchmarks/mutation/: the graph, the check that notices, and words of it.
EXAMPLES = {
    # The file chose the tolerance of its own verification.
    "a dead cast to float16": (MOMENTUM, GRAPH, "node 'dead' (Cast)"),
    "a dead cast to float16, and a gradient off by one in a thousand": (MOMENTUM, GRAPH, "mutant.mul' (Mul)"),
    # Metadata were believed.
    "swap two states in the metadata": (MOMENTUM, METADATA, "graphscale.state: 'fc1.weight' is"),
    "swap two states in the graph": (MOMENTUM, GRAPH, "the output 'fc1.weight.next' of the graph is node 'graph"),
    "swap two states in the graph and in the metadata": (MOMENTUM, METADATA, "graphscale.state: 'fc1.weight' is"),
    "forge the values that the scale misses": (MOMENTUM, METADATA, "graphscale.report: 'missed'"),
    "another policy in the metadata": (MOMENTUM, GRAPH, "'multiplier'"),
    "another class of policy in the metadata": (MOMENTUM, GRAPH, "'current_loss_scale' is none of the inputs"),
    "another first scale in the metadata": (MOMENTUM, STARTS, "'current_loss_scale' is 32768.0, and should be 64.0"),
    "another period in the metadata": (MOMENTUM, GRAPH, "'increment_period'"),
    "name another value the loss": (MOMENTUM, METADATA, "call 'current_loss_scale' the loss, and should 'loss'"),
    "name another value the flag": (MOMENTUM, METADATA, "call 'loss' the all finite, and should 'all_finite'"),
    "exchange counters in the metadata": (MOMENTUM, METADATA, "call 'skipped_steps' the steps"),
    "reorder the gradients of telemetry": (MOMENTUM, METADATA, "graphscale.telemetry: 'gradients'"),
    # Outside of the range of random feeds.
    **{
        f"clip {what} at {bound}": (MOMENTUM, GRAPH, "mutant.clip' (Clip)")
        for what in ("an activation", "a gradient", "a weight", "a moment")
        for bound in ("1000", "1e+10", "1e+30")
    },
    "clip the global norm at 1e6": (MOMENTUM, GRAPH, "mutant.mul' (Mul)"),
    "round a gradient to float16": (MOMENTUM, GRAPH, "mutant.cast_1' (Cast)"),
    "divide a gradient in float16": (MOMENTUM, GRAPH, "(Cast)"),
    "cast the scale to float16 where it enters": (MOMENTUM, GRAPH, "mutant.cast_1' (Cast)"),
    "cap the counter of the optimizer": (ADAM, GRAPH, "mutant.min' (Min)"),
    "skip where a gradient reaches 1e4": (MOMENTUM, GRAPH, "mutant.and' (And)"),
    "skip where the loss is not finite": (MOMENTUM, GRAPH, "mutant.and' (And)"),
    "skip batches of 1000 samples": (SYMBOLIC, GRAPH, "mutant.and' (And)"),
    "check gradients rounded to float16": (MOMENTUM, GRAPH, "mutant.cast_1' (Cast)"),
    "check squared gradients": (MOMENTUM, GRAPH, "mutant.mul' (Mul)"),
    "another next scale at a scale of 12345": (MOMENTUM, GRAPH, "mutant.where' (Where)"),
    "another next scale after 1234 good steps": (MOMENTUM, GRAPH, "mutant.where' (Where)"),
    "count no step after 1000": (MOMENTUM, GRAPH, "mutant.min' (Min)"),
    "report no share of zeros above 0.999": (MOMENTUM, GRAPH, "mutant.min' (Min)"),
    "the first four samples alone": (SYMBOLIC, GRAPH, "mutant.slice' (Slice)"),
    "fold the size of a batch of four": (SYMBOLIC, GRAPH, "the constant 'mutant.constant'"),
    "declare a size where the graph declares none": ("ort/gradbuilder_regression", GRAPH, "'mul_4' is declared"),
    # Initial values.
    "begin with NaN": (MOMENTUM, STARTS, "'current_loss_scale' is nan, and should be 32768.0"),
    "begin with an infinite scale": (MOMENTUM, STARTS, "'current_loss_scale' is inf, and should be 32768.0"),
    "begin with a scale of 0": (MOMENTUM, STARTS, "'current_loss_scale' is 0.0, and should be 32768.0"),
    "begin with a negative scale": (MOMENTUM, STARTS, "'current_loss_scale' is -1.0, and should be 32768.0"),
    "begin with a scale of 2**120": (MOMENTUM, STARTS, "'current_loss_scale' is 1.32922"),
    "begin with -100000 good steps": (MOMENTUM, STARTS, "'good_steps' is -100000, and should be 0"),
    "begin with a hysteresis of -5": (MOMENTUM, STARTS, "'hysteresis_left' is -5, and should be 2"),
    # The proof alone.
    "check a gradient tiled zero times": (MOMENTUM, GRAPH, "mutant.tile' (Tile)"),
    "check a gradient cast to int32": (MOMENTUM, GRAPH, "mutant.cast_1' (Cast)"),
    "check a gradient through a float8 that saturates": (MOMENTUM, GRAPH, "mutant.cast_1' (Cast)"),
    "check a product with an empty tensor": (MOMENTUM, GRAPH, "mutant.mul' (Mul)"),
    "guard in float16": (MOMENTUM, GRAPH, "mutant.cast"),
}

_scaled = functools.cache(Scaled)


def _build(kind: str) -> tuple[Mutant, ir.Model]:
    (found,) = [each for each in KINDS if each.name == kind]
    return next(mutants([EXAMPLES[kind][0]], ["onnx"], [found], find=_scaled))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_it_is_rejected(kind: str) -> None:
    mutant, original = _build(kind)
    _, name, words = EXAMPLES[kind]
    report = verify(original, mutant.damaged, runs=0)
    (check,) = [each for each in report.checks if each.name == name]
    assert check.status == ("not proved" if name == GRAPH else "fails")
    assert words in check.detail
    assert not report.ok


def test_a_capped_learning_rate() -> None:
    more = "dw_lr = Mul(dw, lr)  w_next = Sub(w, dw_lr)"
    original = linear_step(more, inputs="float[4,3] w, float lr", outputs="float[4,3] w_next")
    scaled = gs.scale(original, updates={"w_next": "w"}).model
    assert isinstance(scaled, onnx.ModelProto)
    node = next(node for node in scaled.graph.node if "lr" in node.input)
    node.input[:] = ["capped" if name == "lr" else name for name in node.input]
    bound = onnx.helper.make_node("Constant", [], ["bound"], value_float=10.0)
    scaled.graph.node.insert(0, onnx.helper.make_node("Min", ["lr", "bound"], ["capped"], name="cap"))
    scaled.graph.node.insert(0, bound)
    report = verify(original, scaled, runs=0, updates={"w_next": "w"})
    assert report.checks[0].status == "not proved"
    assert "node 'cap' (Min) is neither the original's nor an inserted piece" in report.checks[0].detail


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["clip a gradient at 1e+30", "begin with a scale of 0", "cap the counter of the optimizer"]
)
def test_exit_code(kind: str, tmp_path: Path) -> None:
    mutant, _ = _build(kind)
    assert not isinstance(mutant.damaged, onnx.ModelProto)
    saving.save(mutant.damaged, tmp_path / "scaled.onnx")
    done = graphscale("verify", MODELS / f"{mutant.model}.onnx", tmp_path / "scaled.onnx", "--runs=0")
    assert (done.returncode, done.stderr) == (1, "")
    assert EXAMPLES[kind][2] in done.stdout.replace("\n", "")
