"""Graphs that are slow when run: a command that runs none ends at once, and one that runs them within its limits."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import graphscale as gs
from fuzz.hostile import bench, growth
from fuzz.hostile.processes import hold
from fuzz.hostile.runner import Category
from graphscale.errors import GraphscaleError

# Nodes that make the value "slow" of single numbers, and the constants that they read.
_Part = tuple[list[onnx.NodeProto], dict[str, object]]

# Commands that run the files get limits of their own; a command that runs none gets none.
_LIMITS = ["--max-seconds", "3", "--max-memory", str(2**30)]
_CALLS = {
    "scale": "scale original.onnx -o out.onnx",
    "scale --dry-run": "scale original.onnx --dry-run",
    "scale --autocast": "scale original.onnx -o out.onnx --autocast float16 --telemetry",
    "inspect": "inspect original.onnx --html out.html --roles-out out.json",
    "inspect step": "inspect step.onnx --json",
    "autocast": "autocast original.onnx -o out.onnx --loss-scale dynamic",
    "lower": "lower step.onnx -o out.onnx",
    "lower-training": "lower-training original.onnx -o out.onnx",
    "strip": "strip step.onnx -o out.onnx",
    "split": "split step.onnx -o out.onnx out2.onnx",
    "lint": "lint step.onnx --sarif out.sarif",
    "lint original": "lint original.onnx --json",
    "diff": "diff original.onnx step.onnx --html out.html",
    "verify --runs 0": "verify original.onnx step.onnx --runs 0",
    "verify": "verify original.onnx step.onnx --runs 1",
    "verify --numeric": "verify original.onnx step.onnx --runs 1 --numeric",
    "inspect --check-gradients": "inspect original.onnx --check-gradients",
}
_RUNNING = ("verify", "verify --numeric", "inspect --check-gradients")


def _attempt(make: Callable[[random.Random], _Part], folder: Path, choices: random.Random) -> str | None:
    """Put the nodes before the readers of some value, and run a command."""
    bench.fill(folder)
    nodes, constants = make(choices)
    read = choices.choice(("x", "t", "dw1", "w1"))
    total = [helper.make_node("ReduceSum", ["slow"], ["slow.sum"], keepdims=0)]
    total += [helper.make_node("Add", [read, "slow.sum"], ["slow.read"])]
    model = growth._insert([*nodes, *total], read, "slow.read")
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items())
    onnx.save(model, folder / "original.onnx")
    try:
        gs.scale(model).save(folder / "step.onnx")
    except GraphscaleError:  # a weight that is read through them is one no more
        onnx.save(model, folder / "step.onnx")
    call = choices.choice([*_CALLS])
    words = _CALLS[call].split() + (_LIMITS if call in _RUNNING else [])
    return hold(words, folder, codes=(0, 1, 2))


def rounds(choices: random.Random) -> _Part:
    """Loop for many rounds, in one or more levels, or without an end."""
    levels, count = choices.randint(1, 3), choices.choice((2**31, 2**50, 2**62))
    body: list[onnx.NodeProto] = [helper.make_node("Neg", ["k"], ["n"])]
    for level in range(levels):
        inner = level < levels - 1
        name, start = ("q", "k") if inner else ("slow.", "slow.zero")
        loop = growth._loop(f"{name}{level}", body, [start], ["k"], ["n"])
        loop.input[0] = choices.choice(("slow.rounds", "")) if level else "slow.rounds"
        body = [loop, helper.make_node("Identity", [loop.output[0]], ["n"])]
    nodes = [body[0], helper.make_node("Identity", [body[0].output[0]], ["slow"])]
    return nodes, {"slow.rounds": np.int64(count), "slow.zero": np.zeros((4, 5), np.float32)}


def sizes(choices: random.Random) -> _Part:
    """Make a large value by one node."""
    count = choices.choice((2**26, 2**30, 2**40, 2**62))
    one, many = np.ones(1, np.float32), np.int64([count])
    by = choices.choice(("Expand", "ConstantOfShape", "Range", "Tile", "Pad", "OneHot", "Resize"))
    constants: dict[str, object] = {"slow.one": one, "slow.many": many}
    operands = ["slow.one", "slow.many"]
    match by:
        case "ConstantOfShape":
            operands = ["slow.many"]
        case "Range":
            constants |= {"slow.from": np.int64(0), "slow.to": np.int64(count), "slow.by": np.int64(1)}
            operands = ["slow.from", "slow.to", "slow.by"]
            range_node = helper.make_node(by, operands, ["slow.range"])
            return [range_node, helper.make_node("Cast", ["slow.range"], ["slow"], to=TensorProto.FLOAT)], constants
        case "Pad":
            constants["slow.many"] = np.int64([0, count])
        case "OneHot":
            constants |= {"slow.at": np.int64([0]), "slow.values": np.float32([0, 1])}
            operands = ["slow.at", "slow.many", "slow.values"]
        case "Resize":
            operands = ["slow.one", "", "", "slow.many"]
    return [helper.make_node(by, operands, ["slow"])], constants


def doublings(choices: random.Random) -> _Part:
    """Double a value, or a shape, again and again."""
    levels, by = choices.randint(26, 60), choices.choice(("Concat", "Tile", "shape"))
    names = ["slow.start", *(f"slow.{i}" for i in range(levels))]
    constants: dict[str, object] = {"slow.start": np.ones(1, np.float32), "slow.two": np.int64([2])}
    if by == "shape":
        constants["slow.start"] = np.int64([1])
        nodes = [helper.make_node("Mul", [a, "slow.two"], [b]) for a, b in itertools.pairwise(names)]
        return [*nodes, helper.make_node("ConstantOfShape", [names[-1]], ["slow"])], constants
    more = {"axis": 0} if by == "Concat" else {}
    nodes = [
        helper.make_node(by, [a, a] if by == "Concat" else [a, "slow.two"], [b], **more)
        for a, b in itertools.pairwise(names)
    ]
    return [*nodes, helper.make_node("Identity", [names[-1]], ["slow"])], constants


def work(choices: random.Random) -> _Part:
    """Compute for long on values that fit the memory."""
    size = choices.choice((2**12, 2**13))
    constants: dict[str, object] = {"slow.shape": np.int64([size, size])}
    nodes = [helper.make_node("ConstantOfShape", ["slow.shape"], ["slow.m0"])]
    count = choices.randint(20, 40)
    nodes += [helper.make_node("MatMul", [f"slow.m{i}", "slow.m0"], [f"slow.m{i + 1}"]) for i in range(count)]
    return [*nodes, helper.make_node("Identity", [f"slow.m{count}"], ["slow"])], constants


CATEGORY = Category(
    "slow",
    "graphs that are slow when run: no command runs them without limits of time and memory",
    {make.__name__: functools.partial(_attempt, make) for make in (rounds, sizes, doublings, work)},
)
