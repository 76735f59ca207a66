"""Lowered files: every command accepts them, and their steps equal those of the plain form, bit for bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from benchmarks.mutants import mutants
from benchmarks.mutation import KINDS, Kind, lowered
from benchmarks.mutation.scalings import WIDE, Scaled
from benchmarks.mutation.wide_step import wide_step
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.lowering.lower_model import ORDER
from tests.build import feeds_for, linear_step
from tests.cli.command import refuse, succeed
from tests.conftest import HAS_TRAINING, MODEL_NAMES, Arrays, assert_all_same_bits, load_example
from tests.session.plain import options

BAD = (np.nan, np.inf, -np.inf, 3e38, 1e-42)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step, the step scaled, and the step lowered."""
    folder = tmp_path_factory.mktemp("lowered")
    ir.save(wide_step(), folder / "step.onnx")
    gs.scale(folder / "step.onnx").save(folder / "scaled.onnx")
    succeed(folder, "lower", "scaled.onnx", "-o", "lowered.onnx", "--target", "ort-cpu")
    return folder


def run(path: Path, batches: list[Arrays], threads: int) -> list[Arrays]:
    """Run a file in a plain loop, and return the outputs of each step."""
    properties = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    states, chosen = json.loads(properties["graphscale.state"]), options(None)
    chosen.intra_op_num_threads = threads
    session = ort.InferenceSession(path, chosen, providers=["CPUExecutionProvider"])
    names, generator, found = [v.name for v in session.get_outputs()], np.random.default_rng(5), list[Arrays]()
    carried = {v.name: generator.standard_normal(v.shape).astype(np.float32) for v in session.get_inputs()}
    for batch in batches:
        outputs = dict(zip(names, session.run(None, {**carried, **batch}), strict=True))
        carried |= {name: outputs[output] for name, output in states.items()}
        found.append(outputs)
    return found


def make_batches() -> list[Arrays]:
    """Batches of the step, each second one with a number that overflows or underflows somewhere."""
    generator, made = np.random.default_rng(6), list[Arrays]()
    for number in BAD:
        for is_bad in (False, True):
            batch = {name: generator.standard_normal((8, n), np.float32) for name, n in (("x", 128), ("y", 20))}
            if is_bad:
                batch["x"][generator.integers(8), generator.integers(128)] = number
            made.append(batch)
    return made


@pytest.mark.parametrize("threads", [1, 2])
def test_the_plain_form_bit_for_bit(folder: Path, threads: int) -> None:
    batches = make_batches()
    plain, fast = (run(folder / f"{name}.onnx", batches, threads) for name in ("scaled", "lowered"))
    for one, other in zip(plain, fast, strict=True):
        assert_all_same_bits(one, other)
    scales = [float(outputs["current_loss_scale.next"]) for outputs in plain]
    assert len({*scales}) > 1, "no step was skipped"


def test_every_pass_had_work(folder: Path) -> None:
    inserted = gs.inspect(folder / "lowered.onnx").inserted
    silent = {"multiply-first", "delay-update"}  # the first moves nodes, the second finds none that can fail
    assert {kind.name for kind in ORDER["cpu"]} - silent <= {*inserted}


def test_scaling_for_the_target_is_the_same(folder: Path) -> None:
    succeed(folder, "scale", "step.onnx", "-o", "at_once.onnx", "--target", "ort-cpu")
    assert (folder / "at_once.onnx").read_bytes() == (folder / "lowered.onnx").read_bytes()


@pytest.mark.full
def test_every_command_takes_it(folder: Path) -> None:
    assert "\nverified, exact (" in succeed(folder, "verify", "step.onnx", "lowered.onnx")
    assert "nothing found (" in succeed(folder, "lint", "lowered.onnx")
    succeed(folder, "strip", "lowered.onnx", "-o", "stripped.onnx")
    assert onnx.load(folder / "stripped.onnx").graph == onnx.load(folder / "step.onnx").graph
    assert gs.inspect(folder / "lowered.onnx").target == "ort-cpu"
    succeed(folder, "inspect", "lowered.onnx", "--html", "page.html")
    assert "bound-gradients" in succeed(folder, "diff", "step.onnx", "lowered.onnx")
    succeed(folder, "split", "lowered.onnx", "-o", "grads.onnx", "update.onnx")
    refuse(folder, "lower", "lowered.onnx", "-o", "twice.onnx", words=["ort-cpu"])


@pytest.mark.full
def test_a_session_trains_it_on(folder: Path) -> None:
    """Its steps are those of the plain form, and its export is a lowered file that verify knows as a trained one."""
    generator = np.random.default_rng(5)
    sizes = {"w1": (128, 512), "b1": (512,), "w2": (512, 20), "b2": (20,), "m2": (512, 20)}
    state = {name: generator.standard_normal(size, np.float32) for name, size in sizes.items()}
    states = []
    for name in ("scaled", "lowered"):
        with gs.Session(folder / f"{name}.onnx", session_options=options(None), state=state) as session:
            for batch in make_batches():
                session.step(batch)
            states.append(session.state_dict())
            session.export(folder / f"{name}.trained.onnx")
    assert_all_same_bits(*states)
    assert gs.verify(folder / "step.onnx", folder / "lowered.trained.onnx", runs=1, trained=True).ok
    assert not gs.verify(folder / "step.onnx", folder / "lowered.trained.onnx", runs=0).ok
    assert {finding.code for finding in gs.lint(folder / "lowered.trained.onnx").findings} == {"GS505"}


def test_a_lost_or_forged_record(folder: Path) -> None:
    model = ir.load(folder / "lowered.onnx")
    record = model.metadata_props.pop(ORIGINAL_KEY)
    ir.save(model, folder / "lost.onnx")
    refuse(folder, "lint", "lost.onnx", words=["lost its plain form"])
    # The record of the scaled file holds the step itself: no plain form.
    model.metadata_props[ORIGINAL_KEY] = ir.load(folder / "scaled.onnx").metadata_props[ORIGINAL_KEY]
    assert model.metadata_props[ORIGINAL_KEY] != record
    ir.save(model, folder / "forged.onnx")
    refuse(folder, "lint", "forged.onnx", words=["carries no loss scale"])


def test_a_loss_that_is_no_scalar(tmp_path: Path) -> None:
    """No state gets the axes of the loss that the update waits for."""
    model = linear_step("u = Mul(dw, two_over_n) w_next = Sub(w, u)", outputs="float[4,3] w_next")
    one, shape = "loss_one", onnx.numpy_helper.from_array(np.array([1, 1]), "ones")
    model.graph.initializer.append(shape)
    model.graph.node.append(onnx.helper.make_node("Reshape", ["loss", "ones"], [one]))
    output = next(value for value in model.graph.output if value.name == "loss")
    output.CopyFrom(onnx.helper.make_tensor_value_info(one, onnx.TensorProto.FLOAT, [1, 1]))
    lowered = gs.scale(model, target="ort-cpu", updates={"w_next": "w"})
    assert lowered.report.inserted["delay-update"]
    (tmp_path / "lowered.onnx").write_bytes(lowered.model.SerializeToString())
    feeds = feeds_for(model)
    session = ort.InferenceSession(tmp_path / "lowered.onnx", options(None), providers=["CPUExecutionProvider"])
    found = dict(zip([v.name for v in session.get_outputs()], session.run(None, feeds), strict=True))
    assert {name: found[name].shape for name in ("w_next", "current_loss_scale.next")} == {
        "w_next": (4, 3),
        "current_loss_scale.next": (),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_models(name: str) -> None:
    path = load_example(name).path
    model = gs.scale(path, target="ort-cpu").model
    own = {finding.code for finding in gs.lint(path).findings}
    found = {finding.code for finding in gs.lint(model).findings if finding.severity != "note"}
    # Its gradients leave in float16.
    assert found - own == ({"GS608"} if name == "pytorch/mlp_float16" else set())
    # Stock ONNX Runtime has none of the operators of the others.
    assert gs.verify(path, model, runs=int(HAS_TRAINING or not name.startswith("ort/"))).ok


OWN = [kind for kind in KINDS if kind.damage.__module__ == lowered.__name__]
_scaled = functools.cache(Scaled)


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.name)
def test_lint_notices_damage(kind: Kind) -> None:
    found = [mutant for mutant, _ in mutants([*WIDE, "pytorch/mlp_momentum"], ["ort-cpu"], [kind], find=_scaled)]
    assert found
    assert all("GS503" in {finding.code for finding in gs.lint(mutant.damaged).findings} for mutant in found)
