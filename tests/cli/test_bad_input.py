"""Bad input: exit code 2, one line on stderr, nothing on stdout, nothing written; from Python the same as an error."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphscale as gs
from graphscale import errors
from tests.build import step
from tests.cli import bad_graphs as bad
from tests.cli.command import EARLIER, refuse
from tests.conftest import MODELS, ROOT

pytestmark = pytest.mark.static

EXAMPLE = MODELS / "pytorch" / "mse_tanh.onnx"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, written into a folder, that `gs.scale` refuses with these options, and what the message names."""

    name: str
    write: Callable[[Path], Path]
    error: type[gs.GraphscaleError]
    words: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def command_line(self) -> list[str]:
        """The same options on the command line."""
        given: list[str] = []
        for key, value in self.options.items():
            if key == "updates":
                given += [f"--update={output}={source}" for output, source in value.items()]
            elif key == "gradients":
                given += [f"--gradient={name}" for name in value]
            else:
                name = "seed-edge" if key == "seed" else key.replace("_", "-")
                given.append(f"--{name}={value}")
        return given


def graph(name: str, make: Callable[[], Any], *rest: Any) -> Case:
    return Case(name, bytes_of("model.onnx", lambda: make().SerializeToString()), *rest)


def bytes_of(name: str, make: Callable[[], bytes]) -> Callable[[Path], Path]:

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(make())
        return folder / name

    return write


def cut(share: float) -> Callable[[Path], Path]:
    data = EXAMPLE.read_bytes()
    return bytes_of("cut.onnx", lambda: data[: int(share * len(data))])


def a_folder(folder: Path) -> Path:
    (folder / "checkpoint").mkdir()
    shutil.copy(EXAMPLE, folder / "checkpoint")
    return folder / "checkpoint"


def no_file(folder: Path) -> Path:
    return folder / "missing.onnx"


File, Unsupported, Loss = errors.ModelFileError, errors.UnsupportedModelError, errors.LossError
Already, Update, Roles = errors.AlreadyScaledError, errors.UpdateError, errors.RolesError
Seed, Gradient, Nonlinear = errors.SeedNotFoundError, errors.GradientError, errors.NonlinearGradientError
Scale, Target, Unknown = errors.InvalidLossScaleError, errors.TargetError, errors.UnknownOperatorError
FILES = [
    Case("npz", bytes_of("a.npz", EXAMPLE.with_suffix(".npz").read_bytes), File, ("a.npz", "not an ONNX model")),
    Case("text", bytes_of("LICENSE", (ROOT / "LICENSE").read_bytes), File, ("LICENSE", "not an ONNX model")),
    Case(
        "lfs-pointer",
        bytes_of("m.onnx", lambda: b"version https://git-lfs.github.com/spec/v1\n"),
        File,
        ("m.onnx", "not an ONNX"),
    ),
    Case("empty", bytes_of("empty.onnx", bytes), File, ("empty.onnx", "not an ONNX model")),
    Case("cut-in-a-tensor", cut(0.9), File, ("cut.onnx", "truncated")),
    Case("cut-early", cut(0.02), File, ("cut.onnx", "truncated")),
    Case("folder", a_folder, File, ("checkpoint", "is a folder; pass an ONNX file")),
    Case("missing", no_file, File, ("missing.onnx", "No such file")),
]
GRAPHS = [
    graph("inference", bad.inference, Loss, ("inference graph", "export the training graph")),
    graph("evaluation", bad.inference_with_scalar, Seed, ("'loss'", "inference graph", "training graph")),
    graph("training-info", bad.with_training_info, Unsupported, ("model.onnx", "training_info", "move")),
    graph("scaled-already", bad.scaled, Already, ("model.onnx", "scale the original graph")),
    graph("scaled-without-metadata", bad.scaled_without_metadata, Already, ("model.onnx", "dropped its metadata")),
    graph("unsorted", bad.unsorted, File, ("topological order", "'d'", "sort the graph")),
    graph("dangling-input", bad.dangling_input, File, ("'ghost'",)),
    graph("dangling-output", bad.dangling_output, File, ("'ghost'",)),
    graph(
        "gradient-penalty",
        bad.gradient_penalty,
        Nonlinear,
        ("'penalty_slope'", "'dx'", "'second_order'", "not linear in the seed", "--gradient"),
    ),
    graph(
        "unknown-operator", bad.unknown_operator, Unknown, ("acme::FastTanhGrad", "'tanh_grad'", "'da'", "replace it")
    ),
    graph("two-next-values", bad.two_next_values, Roles, ("'w1_next'", "'w1_ahead'", "value of w1?", "--roles-out")),
    graph("beta2-of-zero", bad.squared_moment_without_decay, Roles, ("'squared'", "value of v?", "--roles-out")),
    graph("opset-too-new", lambda: step(opset=29), Target, ("opset 29", "'onnx'", "28", "export it")),
    graph("opset-too-old", lambda: step(opset=9), Target, ("opset 9", "10 to 28", "export it")),
    graph("ir-too-new", lambda: step(ir_version=15), Target, ("IR version 15", "up to 14", "ir_version=14")),
]
OPTIONS = [
    graph("no-such-loss", step, Loss, ("--loss nope", "no value"), {"loss": "nope"}),
    graph("loss-not-scalar", step, Loss, ("dw1 FLOAT[4,5]", "a scalar; name the mean"), {"loss": "dw1"}),
    graph("loss-not-scalar-inside", step, Loss, ("--loss d:", "a scalar"), {"loss": "d"}),
    graph(
        "loss-not-floating",
        lambda: step("n = Size(x)", outputs="int64 n, float[4,5] dw1"),
        Loss,
        ("n INT64", "not floating point"),
        {"loss": "n"},
    ),
    graph("loss-is-an-input", step, Loss, ("--loss x", "is an input"), {"loss": "x"}),
    graph("no-such-output", bad.sgd, Update, ("no output 'nope'",), {"updates": {"nope": "w1"}}),
    graph("no-such-input", bad.sgd, Update, ("no input 'nope'",), {"updates": {"w1_next": "nope"}}),
    graph(
        "shapes-differ",
        bad.sgd,
        Update,
        ("w1_next FLOAT[4,5]", "w2 FLOAT[5,3]", "must be the same"),
        {"updates": {"w1_next": "w2"}},
    ),
    graph(
        "input-named-twice",
        lambda: bad.sgd("w1_b = Neg(w1)", outputs="float[4,5] w1_b"),
        Update,
        ("'w1' is named for two outputs",),
        {"updates": {"w1_next": "w1", "w1_b": "w1"}},
    ),
    graph("gradient-as-update", step, Update, ("--update dw1=w1", "is a gradient"), {"updates": {"dw1": "w1"}}),
    graph("no-such-gradient", step, Gradient, ("--gradient nope", "no value"), {"gradients": ["nope"]}),
    graph("gradient-is-an-input", step, Gradient, ("--gradient w1", "not computed"), {"gradients": ["w1"]}),
    graph(
        "gradient-is-forward", step, Gradient, ("--gradient h", "'loss' depends on this value"), {"gradients": ["h"]}
    ),
    graph("seed-no-node", step, Seed, ("--seed-edge nope:0", "there is no node 'nope'"), {"seed": "nope:0"}),
    graph("seed-no-index", bad.named_seed, Seed, ("--seed-edge seed", "NODE:INDEX"), {"seed": "seed"}),
    graph(
        "seed-index-high",
        bad.named_seed,
        Seed,
        ("--seed-edge seed:2", "has 2 inputs, counted from 0"),
        {"seed": "seed:2"},
    ),
    graph("seed-index-word", bad.named_seed, Seed, ("--seed-edge seed:²", "NODE:INDEX"), {"seed": "seed:²"}),
    graph("seed-unnamed-node", step, Seed, ("--seed-edge :1", "NODE:INDEX"), {"seed": ":1"}),
    graph("scale-below-one", step, Scale, ("at least 1", "0.5"), {"loss_scale": 0.5}),
    graph("scale-nan", step, Scale, ("at least 1", "nan"), {"loss_scale": float("nan")}),
    graph("scale-inf", step, Scale, ("finite", "inf"), {"loss_scale": float("inf")}),
    graph("scale-above-float32", step, Scale, ("float32", "1e+39"), {"loss_scale": 1e39}),
    graph("scale-text", step, Scale, ("often", "dynamic"), {"loss_scale": "often"}),
    graph("no-such-target", step, Target, ("'tpu'", "ort-training-cuda"), {"target": "tpu"}),
    graph("training-opset", lambda: step(opset=22), Target, ("opset 22", "21", "export"), {"target": "ort-training"}),
    graph("training-ir", lambda: step(ir_version=11), Target, ("version 11", "=10"), {"target": "ort-training-cuda"}),
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", [*FILES, *GRAPHS, *OPTIONS], ids=lambda case: case.name)
def test_scale(case: Case, tmp_path: Path) -> None:
    model, output = case.write(tmp_path), tmp_path / "scaled.onnx"
    output.write_bytes(EARLIER)
    refuse(tmp_path, "scale", model, "-o", output, *case.command_line(), words=case.words)
    with pytest.raises(gs.GraphscaleError) as raised:
        gs.scale(model, **case.options)
    assert type(raised.value) is case.error
    assert all(word in str(raised.value) for word in case.words), str(raised.value)


@pytest.mark.parametrize("case", [FILES[0], FILES[-1], GRAPHS[0]], ids=lambda case: case.name)
def test_inspect(case: Case, tmp_path: Path) -> None:
    refuse(tmp_path, "inspect", case.write(tmp_path), "--json", words=case.words)


def test_a_model_cut_anywhere(tmp_path: Path) -> None:
    data, path = EXAMPLE.read_bytes(), tmp_path / "cut.onnx"
    for end in range(0, len(data), 97):
        path.write_bytes(data[:end])
        with pytest.raises(errors.ModelFileError, match=r"cut\.onnx"):
            gs.scale(path)
