"""Export the steps `unseen-*`: `python -m models.zoo.unseen --out FOLDER [--only PATTERN ...] [--exporters NAME ...]`.

Their author knew nothing of the analysis. ONNX Runtime runs each step twice: all is finite, the loss changes.
One kind of three goes to FOLDER/aside. `--pack` writes `unseen.zip` from the folders; the truth says `aside`.
"""

import argparse
import importlib
import json
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from models.zoo import export, pack, styles
from models.zoo.steps import KINDS, Inputs, Maker, Outputs, Step, Style, steps

Made = tuple[Inputs, Callable[..., Outputs], list[str]]
OURS: dict[str, tuple[str, Maker]] = {}
"""The kinds; not in the registry of the zoo, whose command exports all."""
ABOUT: dict[str, dict[str, Any]] = {}
"""What the truth of a kind says besides roles: the parameters under the script's names, and what is right."""
# Order of the inputs by role (states, batch, hyperparameters, constants), of the outputs (losses, metrics, gradients,
# states), and the names of an input, of a next value, and of another output.
FACES = {
    "next": ("BSHC", "LMGS", "{n}", "{n}_next", "{n}"),
    "x0": ("SBHC", "SLMG", "x{i}", "out{i}", "out{i}"),
    "arg": ("BSHC", "LSMG", "arg{i}_1", "getitem_{i}", "getitem_{i}"),
    "inout": ("SHBC", "MLSG", "in.{n}", "out.{n}", "out.{n}"),
    "new": ("SBCH", "SLMG", "{n}", "new_{n}", "{n}"),
    "old": ("HSBC", "SGML", "{n}_old", "{n}", "{n}"),
    "t": ("SBHC", "LMSG", "{n}_t", "{n}_t1", "{n}"),
    "updated": ("CSBH", "SMGL", "{n}", "updated.{n}", "{n}"),
    "donated": ("SBHC", "SLMG", "donated_{i}", "result_{i}", "result_{i}"),
    "serving": ("SHBC", "LSMG", "serving_default_{n}:0", "StatefulPartitionedCall:{i}", "StatefulPartitionedCall:{i}"),
    "camel": ("BHSC", "MSLG", "{n}In", "{n}Out", "{n}"),
    "slash": ("BSHC", "GMSL", "train/{n}", "train/{n}/assign", "train/{n}"),
    "mixed": ("?", "?", "t_in_{i}", "t_out_{i}", "t_out_{i}"),
    "anyorder": ("?", "?", "{n}", "{n}_new", "{n}"),
}
OWN = {
    "exporter": Style(names="exporter"),
    "raw": Style(names="exporter", optimize=False, opset=18),
    "stored": Style(states="initializers"),
    "bare": Style(names="exporter", shapes="inputs", order="reversed"),
}


def add(name: str, exporter: str, make: Callable[[], Made], faces: str, right: str = "scale", **more: Any) -> None:
    """Register a kind; it has one step for each of the `faces`."""

    def maker() -> list[Step]:
        inputs, run, parameters = make()
        ABOUT[f"unseen-{name}"] = {"parameters": parameters, "right": right}
        return [Step(face, inputs, run, OWN.get(face, Style()), **more) for face in faces.split()]

    OURS[f"unseen-{name}"] = exporter, maker


def is_aside(kind: str) -> bool:
    """Report whether a kind is set aside: one of three, by a hash of its name."""
    return int(sha256(kind.encode()).hexdigest(), 16) % 3 == 0


def face(name: str, path: Path, truth: dict[str, Any]) -> dict[str, str]:
    """Give a model the names and the order of a face; return the new names."""
    model = ir.load(path)
    order_in, order_out, an_input, following, an_output = FACES[name]
    states = truth["states"]
    of_input = dict.fromkeys(states.values(), "S") | dict.fromkeys(truth["batch"], "B")
    of_input |= dict.fromkeys(truth["hyperparameters"], "H") | dict.fromkeys(truth["constants"], "C")
    of_output = dict.fromkeys(states, "S") | dict.fromkeys(truth["losses"], "L")
    of_output |= dict.fromkeys(truth["metrics"], "M") | dict.fromkeys(truth["gradients"], "G")
    new: dict[str, str] = {}
    for values, roles, order in ((model.graph.inputs, of_input, order_in), (model.graph.outputs, of_output, order_out)):
        chance = random.Random(path.name + order)
        items = sorted(values, key=lambda v: chance.random() if order == "?" else order.index(roles[v.name]))
        values.clear()
        values.extend(items)
        for i, value in enumerate(items):
            if roles is of_input:
                new[value.name] = an_input.format(n=value.name, i=i)
            elif value.name in states:
                new[value.name] = following.format(n=states[value.name], i=i)
            else:
                new[value.name] = an_output.format(n=value.name, i=i)
    interface = [*model.graph.inputs, *model.graph.outputs]
    if len(set(new.values())) < len(interface):
        raise ValueError(f"names of {name} are not unique")
    taken = set(new.values())
    others = [value for node in model.graph.all_nodes() for value in node.outputs if not value.is_graph_output()]
    for value in [*others, *model.graph.initializers.values()]:
        if value.name in taken and not value.is_graph_input():
            value.name = f"{value.name}_inner"
    for value in interface:
        value.name = new[value.name]
    ir.save(model, path)
    return new


def run_twice(path: Path, feeds: styles.Feeds, truth: dict[str, Any]) -> str:
    """Run two steps; raise a ValueError unless all is finite and the losses change."""
    model = ir.load(path)
    for name in set(truth["states"].values()) & set(model.graph.initializers):
        value = model.graph.initializers.pop(name)
        feeds[name], value.const_value = value.const_value.numpy(), None
        if not value.is_graph_input():
            model.graph.inputs.append(value)
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
    ends = []
    for turn in range(6):
        if turn > 1 and ends[0] != ends[-1]:
            break  # two steps are enough, unless weights wait for further micro-batches
        found = dict(zip(names, session.run(names, feeds), strict=True))
        feeds |= {old: found[new] for new, old in truth["states"].items() if old in feeds}
        if bad := [name for name, value in found.items() if not np.isfinite(np.asarray(value, np.float64)).all()]:
            raise ValueError(f"not finite: {bad}")
        ends.append([float(found[name].astype(np.float64).sum()) for name in truth["losses"]])
    trained = set(truth["parameters"]) & set(truth["states"].values())
    if trained and ends[0] and ends[0] == ends[-1]:
        raise ValueError(f"the loss stays {ends[0]}")
    return f"losses {ends}"


def write(step: Step, folder: Path) -> str:
    """Export a step, give it its face, and check two steps of it."""
    line = export.write(step, folder)
    path = folder / f"{step.name}.onnx"
    truth, facts = json.loads(path.with_suffix(".json").read_text()), dict(ABOUT[step.kind])
    feeds = dict(np.load(path.with_suffix(".npz")))
    try:
        # An exporter's names stand in the order of the script's unless the style moves them.
        given = styles.permute(list(step.inputs.flat()), step.style.order, f"{step.name} in")
        if step.style.names == "exporter":
            exported = dict(zip(given, [value.name for value in ir.load(path).graph.inputs], strict=True))
            facts["parameters"] = [exported[name] for name in facts["parameters"]]
        if step.variant in FACES:
            names = face(step.variant, path, truth)
            roles = {key: value for key, value in truth.items() if key not in ("kind", "exporter")}
            renamed = lambda item: (  # noqa: E731
                {names[key]: names[value] for key, value in item.items()}
                if isinstance(item, dict)
                else [names[name] for name in item]
            )
            truth |= {key: renamed(value) for key, value in roles.items()}
            feeds = {names[name]: value for name, value in feeds.items()}
            facts["parameters"] = renamed(facts["parameters"])
        line += ", " + run_twice(path, feeds, truth | facts)
    except Exception:
        for file in folder.glob(f"{step.name}.*"):
            file.unlink()
        raise
    np.savez_compressed(path.with_suffix(".npz"), **feeds)
    path.with_suffix(".json").write_text(json.dumps(truth | facts | {"aside": is_aside(step.kind)}, indent=1) + "\n")
    return line


def main() -> None:
    """Export the steps of the frameworks that are asked for, or pack what was exported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--exporters", nargs="+", choices=export.EXPORTERS, default=[])
    parser.add_argument("--missing", action="store_true", help="leave out what is there")
    parser.add_argument("--pack", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.exporters:
        importlib.import_module(f"models.zoo.{name}.exporter")
    KINDS.clear()
    KINDS.update(OURS)
    for kind in sorted(KINDS):
        folder = arguments.out / ("aside" if is_aside(kind) else "open")
        if not any(fnmatch(kind, f"unseen-{pattern}") for pattern in arguments.only):
            continue
        if arguments.missing and list(folder.glob(f"{kind}.*.json")):
            continue
        try:
            for step in steps([kind], export.prepare):
                print(write(replace(step), folder), flush=True)
        except Exception as error:
            print(f"{kind} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
            with (arguments.out / "failed.log").open("a") as log:
                log.write(f"{kind}\n{''.join(traceback.format_exception(error))}\n")
    if arguments.pack:
        paths = sorted(arguments.out.glob("*/unseen-*.onnx"), key=lambda path: path.name)
        pack.write(paths, pack.UNSEEN)
        print(f"{len(paths)} steps, {pack.UNSEEN.stat().st_size} bytes")


if __name__ == "__main__":
    importlib.import_module("models.zoo.unseen").main()  # not the copy that runs as __main__
