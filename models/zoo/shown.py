"""Show a value of the inside of exported steps as one more output, and judge the roles again.

`python -m models.zoo.shown FOLDER [--seed N] [--share X]` takes the steps that are right without a hint. The new output
is no loss and no next value: a mean, a largest or a norm over some value, the value itself, a product of it with a
constant matrix, or the sum of both. A step is wrong where that output, another loss or another pair is certain.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import graphscale as gs
from graphscale.errors import GraphscaleError
from models.zoo.trial import judge

NAME = "shown"
REDUCTIONS = {"mean": "ReduceMean", "largest": "ReduceMax", "norm": "ReduceL2"}
FORMS = (*REDUCTIONS, "itself", "product", "sum")


def values_of(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the float values that nodes compute, with more than one element, and their shapes."""
    inferred = onnx.shape_inference.infer_shapes(model)
    computed = {name for node in model.graph.node for name in node.output}
    shapes = {}
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        kind = value.type.tensor_type
        shape = tuple(each.dim_value for each in kind.shape.dim)
        if value.name in computed and kind.elem_type == TensorProto.FLOAT and shape and all(shape):
            shapes[value.name] = shape
    return shapes


def show(model: onnx.ModelProto, form: str, value: str, shape: tuple[int, ...]) -> onnx.ModelProto | None:
    """Return a copy of a model with one more output; None if the form does not fit."""
    shown = onnx.ModelProto.FromString(model.SerializeToString())
    graph = shown.graph
    if form in REDUCTIONS:
        graph.node.append(helper.make_node(REDUCTIONS[form], [value], [NAME], keepdims=0))
        shape = ()
    elif form == "itself":
        graph.node.append(helper.make_node("Identity", [value], [NAME]))
    elif len(shape) != 2:
        return None
    else:
        width = shape[1]
        matrix = np.random.default_rng(1).standard_normal((width, width)).astype(np.float32) / width
        graph.initializer.append(numpy_helper.from_array(matrix, f"{NAME}_by"))
        product = NAME if form == "product" else f"{NAME}_product"
        graph.node.append(helper.make_node("MatMul", [value, f"{NAME}_by"], [product]))
        if form == "sum":
            graph.node.append(helper.make_node("Add", [value, product], [NAME]))
    graph.output.append(helper.make_tensor_value_info(NAME, TensorProto.FLOAT, shape))
    return shown


def outcomes(path: Path, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield, for each form, the value that is shown, the outcome, and the reason."""
    model, truth = onnx.load(path), json.loads(path.with_suffix(".json").read_text())
    chosen, shapes = random.Random(f"{seed} {path.stem}"), values_of(model)
    try:
        is_right = judge(path.stem, model, gs.inspect(model), truth).outcome == "right"
    except GraphscaleError:
        return
    truth["metrics"] = [*truth["metrics"], NAME]
    for form in FORMS if is_right and shapes else ():
        value = chosen.choice(sorted(shapes))
        shown = show(model, form, value, shapes[value])
        if shown is None:
            continue
        try:
            report = gs.inspect(shown)
            outcome = judge(path.stem, shown, report, truth)
        except GraphscaleError as error:
            yield form, value, "refused", type(error).__name__
            continue
        is_open = any(entry.name == report.loss and not entry.certain for entry in report.roles)
        is_asked = outcome.outcome.startswith("asked") or (is_open and outcome.reason.startswith("loss "))
        yield form, value, "asked" if is_asked else outcome.outcome, outcome.reason


def main() -> None:
    """Judge all steps of a folder, and print the wrong ones and the numbers of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of export.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in sorted(arguments.folder.glob("**/*.onnx")):
        if random.Random(f"{path.stem} {arguments.seed}").random() < arguments.share:
            for form, value, outcome, reason in outcomes(path, arguments.seed):
                counts[form, outcome] += 1
                if outcome == "wrong":
                    print(f"{path.stem}: {form} of {value}: {reason}")
    for form in FORMS:
        print(form, {outcome: count for (each, outcome), count in sorted(counts.items()) if each == form})


if __name__ == "__main__":
    main()
