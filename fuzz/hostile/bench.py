"""Good files of every kind that graphscale reads, and calls of every command on them: the base of hostile cases."""

from __future__ import annotations

import functools
import json
import random
import shlex
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx

import graphscale as gs
from graphscale.analysis.roles.roles_file import roles_file
from graphscale.checks.verification.counterexample import save_case
from graphscale.checks.verification.verify_report import Case
from graphscale.training.run import Options, Run
from tests.build import feeds_for
from tests.cli.bad_graphs import sgd
from tests.conftest import MODELS

_TRAIN = "train step.onnx --data data.npz --max-steps 2 --quiet"
# Each call reads the files of the bench that it names, and writes those whose names begin with "out".
CALLS: dict[str, str] = {
    "scale": "scale original.onnx -o out.onnx --roles roles.json --loss-scale scale.json",
    "scale --autocast": "scale original.onnx -o out.onnx --autocast float16 --telemetry",
    "scale FOLDER": "scale artifacts -o outfolder",
    "inspect": "inspect original.onnx --roles roles.json --html out.html --roles-out out.json",
    "inspect --json": "inspect step.onnx --json",
    "inspect --check-gradients": "inspect original.onnx --check-gradients --feeds feeds.npz",
    "autocast": "autocast original.onnx -o out.onnx --lists lists.json --roles roles.json --loss-scale scale.json",
    "autocast FOLDER": "autocast artifacts -o outfolder",
    "lower": "lower step.onnx -o out.onnx",
    "lower-training": "lower-training original.onnx -o out.onnx",
    "strip": "strip step.onnx -o out.onnx",
    "strip FOLDER": "strip scaled -o outfolder",
    "split": "split step.onnx -o out.onnx out2.onnx --stages 2",
    "fuse": "fuse artifacts -o out.onnx --loss-scale scale.json",
    "export-weights": "export-weights state.safetensors original.onnx -o out.onnx --partial",
    "export-weights npz": "export-weights state.npz original.onnx -o out.onnx --partial --json",
    "export-weights STEP": "export-weights fused.onnx artifacts/eval_model.onnx -o out.onnx --partial",
    "export-weights CHECKPOINT": "export-weights fused.onnx artifacts/checkpoint -o outcheckpoint --partial",
    "train": f"{_TRAIN} --state state.npz --metrics out.jsonl -o out.onnx",
    "train --feed": "train rated.onnx --data data.npz --max-steps 2 --quiet --feed rate=fed.npy --state state.npz",
    "train safetensors": f"{_TRAIN} --state state.safetensors --metrics out.csv --checkpoint-dir outkept",
    "train --resume": "train step.onnx --data data.npz --max-steps 3 --quiet --checkpoint-dir kept --resume",
    "plot": "plot run.jsonl -o out.png",
    "plot csv": "plot run.csv -o out.svg",
    "verify": "verify original.onnx step.onnx --runs 1 --feeds feeds.npz --roles roles.json",
    "verify --numeric": "verify original.onnx step.onnx --runs 1 --numeric --json",
    "verify --replay": "verify original.onnx step.onnx --replay case.npz",
    "lint": "lint step.onnx --sarif out.sarif",
    "lint original": "lint original.onnx --json",
    "lint --original": "lint others.onnx --original original.onnx",
    "diff": "diff original.onnx step.onnx --html out.html",
    "diff --json": "diff step.onnx original.onnx --json",
}


def words_of(call: str) -> list[str]:
    """Return the words of a call."""
    return shlex.split(CALLS[call])


def inputs_of(call: str, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Return the files that a call reads, those in folders among them, by the ends of their names."""
    folder, found = make_bench(), list[str]()
    for word in words_of(call):
        path = folder / word.rpartition("=")[2]
        if path.is_dir():
            found += [str(file.relative_to(folder)) for file in sorted(path.iterdir()) if file.suffix != ".npz"]
        elif path.is_file():
            found.append(str(path.relative_to(folder)))
    return [name for name in found if name.endswith(suffixes)]


@functools.cache
def calls_on(*suffixes: str) -> list[tuple[str, str]]:
    """Return each call with each file that it reads, by the ends of their names."""
    return [(call, name) for call in CALLS for name in inputs_of(call, suffixes or ("",))]


def choose(choices: random.Random, folder: Path, *suffixes: str) -> tuple[list[str], Path]:
    """Fill a folder; return the words of a call and the path of a file that it reads, by the ends of its name."""
    fill(folder)
    call, name = choices.choice(calls_on(*suffixes))
    return words_of(call), folder / name


def fill(folder: Path) -> None:
    """Put the files into a folder."""
    shutil.copytree(make_bench(), folder, dirs_exist_ok=True)


@functools.cache
def make_bench() -> Path:
    """Return a folder with all files; it is unchanged."""
    made = tempfile.TemporaryDirectory(prefix="graphscale-bench-")
    _KEPT.append(made)
    folder = Path(made.name)
    _write_models(folder)
    _write_arrays(folder)
    _write_texts(folder)
    return folder


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when this process ends


def _write_models(folder: Path) -> None:
    onnx.save(sgd(), folder / "original.onnx")
    gs.scale(sgd()).save(folder / "step.onnx")
    others = onnx.load(folder / "step.onnx")  # as another tool would scale it
    for each in (others, *others.graph.node):
        del each.metadata_props[:]
    onnx.save(others, folder / "others.onnx")
    rated = sgd()
    (rate,) = (tensor for tensor in rated.graph.initializer if tensor.name == "rate")
    rated.graph.initializer.remove(rate)
    rated.graph.input.append(onnx.helper.make_tensor_value_info("rate", onnx.TensorProto.FLOAT, []))
    gs.scale(rated).save(folder / "rated.onnx")
    artifacts = MODELS / "ort" / "artifacts" / "digits_sgd"
    shutil.copytree(artifacts, folder / "artifacts", ignore=shutil.ignore_patterns("*.npz"))
    gs.scale_artifacts(artifacts, folder / "scaled")
    gs.fuse(artifacts).save(folder / "fused.onnx")


def _write_arrays(folder: Path) -> None:
    arrays = feeds_for(sgd())
    weights = {name: arrays[name] for name in ("w1", "w2")}
    batch = {name: arrays[name] for name in ("x", "t")}
    np.savez(folder / "feeds.npz", **arrays)
    np.savez(folder / "state.npz", **weights)
    np.savez(folder / "data.npz", **{name: np.concatenate([array] * 2) for name, array in batch.items()})
    np.save(folder / "fed.npy", np.float32(0.1))
    save_case(
        Case("step", arrays | {"current_loss_scale": np.float32(8), "good_steps": np.int64(0)}), folder / "case.npz"
    )
    session = gs.Session(gs.scale(sgd()), state=weights)
    session.step(batch)
    session.save_state(folder / "state.safetensors", {"epoch": "1"})
    files = {"step": folder / "step.onnx", "data": folder / "data.npz", "state": folder / "state.npz"}
    for more in (
        {"checkpoint_dir": folder / "kept"},
        {"metrics": folder / "run.jsonl"},
        {"metrics": folder / "run.csv"},
    ):
        training = Run(Options(**files, max_steps=2, **more))
        with training.session, training.opened() as trainer:
            list(trainer.run(training.total, lambda: False))


def _write_texts(folder: Path) -> None:
    (folder / "scale.json").write_text(gs.presets.deepspeed().to_json())
    (folder / "lists.json").write_text(json.dumps({"allow": ["MatMul"], "deny": ["Exp", "Log"], "infer": ["Add"]}))
    (folder / "roles.json").write_text(roles_file(gs.inspect(sgd()).roles))
