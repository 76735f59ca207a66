"""More than a hundred wrong uses of the command line and of Python: what is called, and words of the message."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import graphscale as gs
from fuzz.hostile.bench import fill
from tests.cli.bad_graphs import inference

__all__ = ["COMMANDS", "PYTHON", "fill_folder"]

Files = Mapping[str, Any]

# The command line, and what its message must have: what is wrong, and what to do.
COMMANDS: dict[str, tuple[str, ...]] = {
    # Files of another kind.
    "scale feeds.npz -o o.onnx": (
        "it seems to be an .npz file",
        "pass an ONNX model here",
        "--data, --state or --feeds",
    ),
    "scale weights.pt -o o.onnx": ("it seems to be a file of PyTorch", "export a training step", "start/pytorch/"),
    "inspect old.pt": ("it seems to be a file of PyTorch", "start/pytorch/"),
    "scale net.keras -o o.onnx": ("it seems to be a Keras model", "start/tensorflow/"),
    "lint net.h5": ("it seems to be a Keras model", "start/tensorflow/"),
    "scale saved -o o.onnx": ("saved is a SavedModel of TensorFlow", "start/tensorflow/"),
    "scale net.tflite -o o.onnx": ("a TensorFlow Lite model", "start/tensorflow/"),
    "scale script.py -o o.onnx": ("a Python program", "export a training step first"),
    "scale notes.txt -o o.onnx": ("it seems to be text", "name the right file"),
    "scale empty.onnx -o o.onnx": ("it is empty", "write it again"),
    "diff original.onnx model.json": ("it seems to be JSON", "name the right file"),
    "scale page.onnx -o o.onnx": ("a page of HTML", "download the file itself"),
    "scale pointer.onnx -o o.onnx": ("a pointer of Git LFS", "git lfs pull"),
    "scale packed.onnx -o o.onnx": ("compressed by gzip", "gunzip"),
    "scale state.safetensors -o o.onnx": ("a safetensors file", "pass an ONNX model here"),
    "scale artifacts/checkpoint -o o.onnx": ("a checkpoint of ONNX Runtime", "pass its folder"),
    "scale kept -o o.onnx": (
        "kept is a folder without ONNX files",
        "pass an ONNX file",
    ),
    "lower scaled -o o.onnx": ("scaled is a folder of artifacts", "pass a model in it", "graphscale fuse FOLDER"),
    "train artifacts --data data.npz": ("artifacts is a folder of artifacts", "graphscale fuse FOLDER -o OUT"),
    "scale original.onn -o o.onnx": ("No such file", "did you mean original.onnx?"),
    "scale gone.onnx -o o.onnx": ("it is a link to nowhere.onnx, which does not exist",),
    "train step.onnx --data dat.npz": ("No such file", "did you mean data.npz?"),
    "train step.onnx --data step.onnx --state state.npz": ("no .npz file", "an ONNX model", "numpy.savez(FILE, NAME="),
    "train step.onnx --data weights.pt --state state.npz": ("a file of PyTorch", "numpy.savez(FILE, NAME=array)"),
    "train step.onnx --data fed.npy --state state.npz": ("one array without a name", "numpy.savez(FILE, NAME=array)"),
    "train step.onnx --data artifacts --state state.npz": ("it is a folder", "name a file"),
    "train step.onnx --data data.npz --state weights.pt": ("expected an .npz or a .safetensors", "a file of PyTorch"),
    "export-weights weights.pt original.onnx -o o.onnx": ("read from .npz, .safetensors", "a file of PyTorch"),
    "verify original.onnx step.onnx --feeds step.onnx": ("no .npz file", "numpy.savez(FILE, NAME=array)"),
    "verify original.onnx step.onnx --replay data.npz": ("no counterexample of graphscale verify",),
    "fuse original.onnx -o o.onnx": ("is not a folder", "a folder that generate_artifacts has written"),
    "fuse kept -o o.onnx": ("has no training_model.onnx", "a folder of artifacts holds"),
    "plot data.npz -o a.png": ("expected a metrics file", ".jsonl or .csv"),
    # Graphs of another kind.
    "lint inference.onnx": ("is an inference graph", "pass a training graph"),
    "scale inference.onnx -o o.onnx": ("inference graph", "export the training graph"),
    "scale step.onnx -o o.onnx": ("already carries a loss scale", "scale the original graph"),
    "inspect step.onnx --loss loss": ("step.onnx is scaled", "pass the original"),
    "autocast step.onnx -o o.onnx": ("carries a loss scale already", "autocast the original, then scale it"),
    "lower original.onnx -o o.onnx": ("carries no loss scale", "graphscale scale MODEL -o OUT"),
    "split original.onnx -o a.onnx b.onnx": ("carries no loss scale", "graphscale scale MODEL -o OUT"),
    "train original.onnx --data data.npz": ("carries no loss scale", "graphscale scale MODEL -o OUT"),
    "verify original.onnx original.onnx": ("carries no loss scale", "graphscale scale MODEL -o OUT"),
    "verify step.onnx original.onnx": ("the original comes first", "verify ORIGINAL SCALED"),
    "verify original.onnx scaled": ("scaled is a folder", "two single graphs, or two folders of artifacts"),
    "strip original.onnx -o o.onnx": ("has nothing to strip",),
    "fuse scaled -o o.onnx": ("already carries a loss scale", "scale the original"),
    "inspect artifacts --html a.html": ("--html is for a single graph", "artifacts is a folder"),
    "scale artifacts -o out --seed-edge a:0": ("--seed-edge is for a single graph", "artifacts is a folder"),
    "scale artifacts -o out --target onnx": ("'onnx' has no training sessions", "choose ort-training"),
    # Names that do not exist.
    "scale original.onnx -o o.onnx --loss los": ("the graph has no value of this name", "did you mean 'loss'?"),
    "scale original.onnx -o o.onnx --gradient dw": ("no value of this name", "did you mean 'dw"),
    "scale named.onnx -o o.onnx --seed-edge nope:0": ("there is no node 'nope'", "there are"),
    "scale named.onnx -o o.onnx --seed-edge sed:0": ("there is no node 'sed'", "did you mean 'seed'?"),
    "scale named.onnx -o o.onnx --seed-edge seed:9": ("the node 'seed' has 2 inputs, counted from 0",),
    "scale named.onnx -o o.onnx --seed-edge seed": ("expected NODE:INDEX",),
    "scale original.onnx -o o.onnx --seed-edge a:0": ("the nodes of this graph have no names",),
    "scale original.onnx -o o.onnx --update w1_nxt=w1": ("no output 'w1_nxt'", "did you mean 'w1_next'?"),
    "scale original.onnx -o o.onnx --update w1_next=w": ("no input 'w'", "did you mean 'w"),
    "scale original.onnx -o o.onnx --update w1_next": ("expected OUT=IN",),
    "scale original.onnx -o o.onnx --keep nope": ("no carried state of this name", "there are w1_next, w2_next"),
    "scale original.onnx -o o.onnx --roles model.json": ("there is no field 'a'", "expected losses, states"),
    "scale original.onnx -o o.onnx --target ort_cpu": ("there is no target 'ort_cpu'", "choose one of onnx, ort-cpu"),
    "scale original.onnx -o o.onnx --loss-scale torhc": ("expected dynamic, a number, a preset", "torch"),
    "autocast original.onnx -o o.onnx --allow matmull": ("there is no operator 'matmull'",),
    "autocast named.onnx -o o.onnx --keep-node sed": ("there is no node 'sed'", "did you mean 'seed'?"),
    "lint step.onnx --scale nope": ("the graph has no value of this name",),
    "lint step.onnx --select GS999": ("there is no lint code 'GS999'", "did you mean"),
    "verify original.onnx step.onnx --dim nope=3": ("no input has an axis of this name",),
    "train step.onnx --data data.npz --state state.npz --provider cuda": ("did you mean CUDAExecutionProvider?",),
    "train step.onnx --data data.npz --state state.npz --feed nope=1": ("the step is fed x, t, not 'nope'",),
    "plot run.jsonl -o a.png --column nope": ("--column nope", "does not have it"),
    "scale original.onnx -o o.onnx --loss h": ("h of unknown type", "name the mean or sum of it"),
    "scale original.onnx -o o.onnx --roles lost.json": ("--roles lost.json: los", "did you mean 'loss'?"),
    "scale original.onnx -o o.onnx --external-data-root nowhere": ("nowhere: there is no such folder",),
    # Values out of range.
    "scale original.onnx -o o.onnx --loss-scale 0.5": ("at least 1", "got 0.5"),
    "scale original.onnx -o o.onnx --multiplier 1": ("above 1, such as 2", "got 1.0"),
    "scale original.onnx -o o.onnx --increment-period 0": ("from 1 to 2**24 steps", "got 0"),
    "scale original.onnx -o o.onnx --autocast float8": ("the type is float16 or bfloat16", "got 'float8'"),
    "lower step.onnx -o o.onnx --target onnx": ("graphs are not lowered for target 'onnx'", "ort-cpu"),
    "split step.onnx -o a.onnx b.onnx --stages 99": ("99 stages do not fit", "2 gradients"),
    "split step.onnx -o a.onnx b.onnx --bucket-size big": ("like '25MiB'",),
    "verify original.onnx step.onnx --tolerance -1": ("at least 0", "-1"),
    "verify original.onnx step.onnx --dim batch=0": ("an axis and a number from 1 to 2**31 - 1",),
    "scale original.onnx -o o.onnx --telemetry ranges,": ("expected 'ranges' or", "got 'ranges,'"),
    "train rated.onnx --data data.npz --state state.npz --feed rate=nan": ("NaN would spread to the weights",),
    "train step.onnx --data data.npz --state state.npz --epochs 0": ("expected 1 or more",),
    "train step.onnx --data data.npz --state state.npz --batch-size 3": ("a fixed batch of 8",),
    "split step.onnx -o a.onnx": ("-o needs a value: -o GRADS.onnx UPDATE.onnx",),
    "scale original.onnx -o o.onnx --loss": ("--loss needs a value: --loss NAME",),
    "demo --steps many": ("--steps", "valid integer"),
    # Data and state that do not fit.
    "train step.onnx --data data.npz": ("w1, w2 have no initializer", "--state FILE.npz"),
    "train step.onnx --data more.npz --state state.npz": ("an array 'extra'", "--ignore-extra"),
    "train step.onnx --data less.npz --state state.npz": ("the step needs 't'", "--feed t=VALUE"),
    "train step.onnx --data double.npz --state state.npz": ("of dtype float64", "convert it with .astype('float32')"),
    "train step.onnx --data narrow.npz --state state.npz": ("'x' has shape [16, 2]", "[samples, 4]"),
    "train step.onnx --data data.npz --state more_state.npz": ("'extra' is not carried", "--ignore-extra"),
    "train step.onnx --data data.npz --state data.npz": ("its role is batch", "--ignore-extra"),
    "train rated.onnx --data data.npz --state state.npz": ("the step needs 'rate'", "--feed rate=VALUE"),
    "train step.onnx --data data.npz --state state.npz --learning-rate 1": ("no input for it", "--learning-rate-input"),
    "train step.onnx --data data.npz --state state.npz --schedule linear": ("--schedule goes with --learning-rate",),
    "train step.onnx --data data.npz --state state.npz --resume": ("--resume goes with --checkpoint-dir",),
    "demo --provider nope": ("'nope' is not in the installed onnxruntime", "CPUExecutionProvider"),
    "train step.onnx --data data.npz --state state.npz --checkpoint-dir kept": ("continue it with --resume",),
    "train step.onnx --data data.npz --state state.npz --metrics a.csv -o a.csv": ("both write a.csv",),
    "train step.onnx --data data.npz --state state.npz --keep-checkpoints 2": ("goes with --checkpoint-dir",),
    "train step.onnx --data data.npz --state state.npz --sharded": ("goes with replicas", "mpiexec -n N"),
    # Command lines.
    "scale '' -o o.onnx": ("the argument behind scale is empty", "give it a value"),
    "scale original.onnx -o ''": ("the argument behind -o is empty", "give it a value"),
    "scale original.onnx -o o.onnx --target=": ("the argument behind --target is empty", "leave it out"),
    "diff original.onnx": ("B is missing: the model to compare with it",),
    "inspect original.onnx --html same.html --roles-out same.html": ("both write same.html", "name two files"),
    "scale original.onnx": ("name the file to write with -o", "--dry-run"),
    "scale original.onnx o.onnx": ("too many arguments: o.onnx", "behind -o"),
    "scale original.onnx -o nowhere/o.onnx": ("does not exist; create it",),
    "scale original.onnx -o original.onnx": ("is read, and would be replaced", "name another file, or pass --force"),
    "scale original.onnx -o o.onnx --loss-scael 8": ("no option --loss-scael; did you mean --loss-scale?",),
    "train step.onnx --data data.npz --lr 0.1": ("no option --lr; did you mean --learning-rate?",),
    "scale original.onnx -o o.onnx --fp16": ("no option --fp16; did you mean --autocast float16?",),
    "train step.onnx": ("--data is missing: arrays named like the inputs",),
    "inspect": ("MODEL is missing: an ONNX training graph", "graphscale inspect --help"),
    "sclae original.onnx": ("Did you mean 'scale'?",),
    "original.onnx -o o.onnx": ("the command comes first, such as graphscale scale MODEL -o OUT",),
    "inspect original.onnx --feeds feeds.npz": ("--feeds goes with --check-gradients",),
    "plot run.jsonl -o a.gif": ("a.gif: expected a name that ends in .png",),
}


def _session(files: Files, **options: Any) -> gs.Session:
    return gs.Session(files["step"], **{"state": files["state"], **options})


def _closed(files: Files) -> gs.Session:
    session = _session(files)
    session.close()
    return session


# Calls of Python on the files of the folder, and what their message must have.
PYTHON: dict[str, tuple[Callable[[Files], object], tuple[str, ...]]] = {
    "a feed is missing": (lambda f: _session(f).step({"x": f["x"]}), ("the step needs a feed for 't'",)),
    "feeds in a list": (lambda f: _session(f).step([f["x"]]), ("feeds are a mapping of input names",)),  # type: ignore[arg-type]
    "an unknown feed": (lambda f: _session(f).step({**f["batch"], "nope": 1}), ("no input 'nope'", "inputs are x, t")),
    "a carried feed": (lambda f: _session(f).step({**f["batch"], "w1": f["x"]}), ("is carried", "do not feed it")),
    "another dtype": (lambda f: _session(f).step({**f["batch"], "x": f["x"].astype(float)}), ("float64", "float32")),
    "another shape": (lambda f: _session(f).step({**f["batch"], "x": f["x"][:4]}), ("shape [4, 4]", "takes [8, 4]")),
    "a text as a feed": (lambda f: _session(f).step({**f["batch"], "x": "x"}), ("is a str", "pass a numpy array")),
    "a closed session": (lambda f: _closed(f).step(f["batch"]), ("the session is closed",)),
    "no state": (lambda f: _session(f, state=None), ("have no initializer", "pass their first values as state")),
    "state of another name": (
        lambda f: _session(f, state={"w3": f["x"]}),
        ("'w3' is not carried", "w1, w2; leave it out"),
    ),
    "a file as state": (lambda f: _session(f, state="state.npz"), ("must map names to arrays", "got a str")),
    "no such provider": (lambda f: _session(f, providers=["cpu"]), ("did you mean CPUExecutionProvider?",)),
    "a session on a plain graph": (lambda f: gs.Session(f["original"]), ("carries no loss scale", "scale it first")),
    "arrays as a state file": (lambda f: _session(f).load_state(f["data"]), ("it seems to be an .npz file",)),
    "scale a missing file": (lambda f: gs.scale("nope.onnx"), ("cannot read nope.onnx", "No such file")),
    "scale nothing": (lambda f: gs.scale(None), ("a model is a path, an onnx_ir.Model or an onnx.ModelProto",)),  # type: ignore[arg-type]
    "scale bytes": (lambda f: gs.scale(f["original"].read_bytes()), ("got a bytes", "onnx.load_model_from_string")),
    "scale a graph": (lambda f: gs.scale(onnx.load(f["original"]).graph), ("onnx.helper.make_model",)),  # type: ignore[arg-type]
    "scale a result": (lambda f: gs.scale(gs.scale(f["original"])), ("pass its attribute model",)),  # type: ignore[arg-type]
    "no such loss scale": (lambda f: gs.scale(f["original"], "auto"), ("pass 'dynamic', a number of at least 1",)),
    "gradients in a text": (lambda f: gs.scale(f["original"], gradients="dw1"), ("pass gradients=['dw1']",)),
    "updates in a list": (lambda f: gs.scale(f["original"], updates=["w"]), ("updates map outputs to inputs",)),  # type: ignore[arg-type]
    "lint an inference graph": (lambda f: gs.lint(f["inference"]), ("is an inference graph", "pass a training graph")),
}


def fill_folder(folder: Path) -> Files:
    """Put the files of these uses into a folder; return the paths and arrays that the calls of Python take."""
    fill(folder)
    (folder / "empty.onnx").touch()
    (folder / "saved").mkdir()
    (folder / "gone.onnx").symlink_to("nowhere.onnx")
    for name, content in {
        "notes.txt": b"hello\nworld\n",
        "script.py": b"import torch\n",
        "model.json": b'{"a": 1}',
        "lost.json": b'{"losses": ["los"]}',
        "page.onnx": b"<!DOCTYPE html><html>",
        "pointer.onnx": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 10\n",
        "packed.onnx": b"\x1f\x8b\x08\0" + bytes(30),
        "old.pt": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
        "net.h5": b"\x89HDF\r\n\x1a\n" + bytes(100),
        "net.tflite": b"\x1c\0\0\0TFL3" + bytes(50),
        "saved/saved_model.pb": b"\x08\x01",
    }.items():
        (folder / name).write_bytes(content)
    for name, members in {"weights.pt": ("w/data.pkl", "w/version"), "net.keras": ("model.weights.h5",)}.items():
        with zipfile.ZipFile(folder / name, "w") as archive:
            for member in members:
                archive.writestr(member, b"\x80\x02}q\0.")
    onnx.save(inference(), folder / "inference.onnx")
    named = onnx.load(folder / "original.onnx")
    next(node for node in named.graph.node if node.output[0] == "dy").name = "seed"
    onnx.save(named, folder / "named.onnx")
    data, state = (dict(np.load(folder / f"{name}.npz")) for name in ("data", "state"))
    np.savez(folder / "more.npz", **data, extra=np.zeros(3))
    np.savez(folder / "more_state.npz", **state, extra=np.zeros(3))
    np.savez(folder / "double.npz", **{name: array.astype(float) for name, array in data.items()})
    np.savez(folder / "narrow.npz", **{**data, "x": data["x"][:, :2]})
    np.savez(folder / "less.npz", x=data["x"])
    shutil.rmtree(folder / "outkept", ignore_errors=True)
    batch = {name: array[:8] for name, array in data.items()}
    paths = {name: folder / f"{name}.onnx" for name in ("step", "original", "inference")}
    return {**paths, "data": folder / "data.npz", "state": state, "batch": batch, "x": batch["x"]}
