"""Steps that are written by hand as ONNX text: `written` puts text and roles together, `export` checks the numbers.

In the text, a float (`0.5`) or a list of integers (`[0, 1]`) as an argument is an initializer.
"""

import importlib
import itertools
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from models.zoo import styles
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, Truth

LITERAL = re.compile(r"(?<=[(, ])(-?\d+\.\d*|\[-?\d+(?:, ?-?\d+)*\])(?=[,)])")
BARE = Style(shapes="interface")
LAYER = "float[6,4] x, float[6,2] y, float[4,2] w"
SQUARES = """p = MatMul(x, w)  e = Sub(p, y)  s = Mul(e, e)  loss = ReduceMean<keepdims=0>(s)
    d = Mul(e, 0.16666667)  xt = Transpose<perm=[1, 0]>(x)  g = MatMul(xt, d)"""
"""The loss of a linear layer, and its gradient `g`."""


@dataclass(frozen=True)
class Written(Step):
    """A step with its graph; `checks` names, for a weight, its gradient or the rate of plain descent by it."""

    model: onnx.ModelProto | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str | float] = field(default_factory=dict)


def parse(text: str, opset: int) -> onnx.ModelProto:
    """Return the model of a text; its first line is `(inputs) => (outputs)`, its functions follow the graph."""
    literals: dict[str, str] = {}
    text = LITERAL.sub(lambda found: literals.setdefault(found[1], f"literal{len(literals)}"), text)
    domains = f'"" : {opset}' + (', "own" : 1' if "own." in text else "")
    model = onnx.parser.parse_model(f"<ir_version: {8 if opset < 21 else 10}, opset_import: [{domains}]>\nstep {text}")
    for literal, name in literals.items():
        numbers = np.int64(json.loads(literal)) if literal[0] == "[" else np.float32(literal)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(numbers), name))
    return model


def sample(value: onnx.ValueInfoProto, given: Any) -> np.ndarray:
    """Return an array of an input's type: the given numbers, broadcast, or random ones."""
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    numbers = np.random.standard_normal(shape) * 0.5 if given is None else np.broadcast_to(given, shape)
    return np.array(numbers).astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))


def written(
    variant: str,
    text: str,
    *,
    feeds: Mapping[str, Any] = MappingProxyType({}),
    checks: Mapping[str, str | float] = MappingProxyType({}),
    opset: int = 17,
    style: Style = BARE,
    warm: int = 2,
    **roles: str,
) -> Written:
    """Return the step of a text: `states` and `kept` are `input:output ...`; `losses` (`loss` if not given), `metrics`,
    `gradients`, `hyper`, `constants` are names; the rest is the batch.
    """
    model = parse(text, opset)
    values = {value.name: sample(value, feeds.get(value.name)) for value in model.graph.input}
    named = {"losses": "loss"} | roles
    carried, advancing = (dict(pair.split(":") for pair in named.get(key, "").split()) for key in ("states", "kept"))
    groups = [[*carried, *advancing], *(named.get(key, "").split() for key in ("hyper", "constants"))]
    batch = {name: value for name, value in values.items() if name not in {*itertools.chain(*groups)}}
    inputs = Inputs(batch, *({name: values[name] for name in group} for group in groups))

    def run(values: Arrays) -> Outputs:
        found = dict(zip((value.name for value in model.graph.output), evaluate(model, values), strict=True))
        keys = ("losses", "metrics", "gradients")
        following = [{name: found[output] for name, output in pairs.items()} for pairs in (carried, advancing)]
        return Outputs(*({name: found[name] for name in named.get(key, "").split()} for key in keys), *following)

    names = {f"{name}_next": output for name, output in (carried | advancing).items()}
    return Written(variant, inputs, run, style, warm=warm, model=model, names=names, checks=checks)


def evaluate(model: onnx.ModelProto, values: Arrays, names: list[str] | None = None) -> list[Any]:
    """Compute the outputs, or the named ones, by ONNX's reference evaluator."""
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(names, values)


def prepare(kind: str) -> None:
    """Seed the random numbers by the kind's name, so that each kind is the same however many are exported."""
    np.random.seed(zlib.crc32(kind.encode()))


def export(step: Written) -> tuple[ir.Model, Truth, styles.Feeds, list[np.ndarray]]:
    """Return the model, the truth under its names, a value for each input, and the outputs of the reference."""
    values = dict(step.inputs.flat())
    for _ in range(step.warm):
        computed = step.run(values)
        values |= computed.states | computed.kept
    computed = step.run(values)
    flat = {step.names.get(name, name): np.asarray(value) for name, value in computed.flat().items()}
    same = dict.fromkeys(values) | dict.fromkeys(computed.flat())
    truth = step.truth(computed).renamed({name: step.names.get(name, name) for name in same})
    for name, weight in step.checks.items():
        check_gradient(step, values, name, weight)
    model = onnx.shape_inference.infer_shapes(step.model) if step.style.shapes == "all" else step.model
    onnx.checker.check_model(model)
    # The reference stacks scalars of a Loop as rows of one element.
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in step.model.graph.output}
    return ir.from_proto(model), truth, values, [flat[name].reshape(shape) for name, shape in shapes.items()]


def check_gradient(step: Written, values: Arrays, name: str, known: str | float) -> None:
    """Raise a ValueError unless a gradient is that of the sum of the losses, by central differences in float64."""
    loss = list(step.run(values).losses)
    wide = {key: value.astype(np.float64) if value.dtype.kind == "f" else value for key, value in values.items()}
    model = onnx.ModelProto()
    model.CopyFrom(step.model)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(widened(tensor))
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        widen(node)
    wanted = known if isinstance(known, str) else step.names[f"{name}_next"]
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(wanted))
    found = evaluate(model, wide, [wanted])[0]
    gradient = np.reshape(found if isinstance(known, str) else (wide[name] - found) / known, -1)
    for index in np.random.RandomState(0).permutation(wide[name].size)[:5]:
        ends = []
        for shift in (1e-4, -1e-4):
            moved = wide[name].copy()
            moved.flat[index] += shift
            ends.append(sum(np.sum(end) for end in evaluate(model, wide | {name: moved}, loss)))
        slope = (ends[0] - ends[1]) / 2e-4
        if abs(slope - gradient[index]) > 2e-3 * max(np.abs(gradient).max(), 1e-3):
            raise ValueError(f"{name}[{index}]: the gradient is {gradient[index]:.5g}, the slope {slope:.5g}")


def widened(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a tensor with float64 in place of float32 and float16."""
    array = onnx.numpy_helper.to_array(tensor)
    return onnx.numpy_helper.from_array(array.astype(np.float64) if array.dtype.kind == "f" else array, tensor.name)


def widen(node: onnx.NodeProto) -> None:
    """Give a node, and those of its bodies, float64 constants and casts."""
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.i in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
            attribute.i = onnx.TensorProto.DOUBLE
        if attribute.name == "value_float":
            attribute.CopyFrom(onnx.helper.make_attribute("value", onnx.helper.make_tensor("", 11, [], [attribute.f])))
        if attribute.type == onnx.AttributeProto.TENSOR:
            attribute.t.CopyFrom(widened(attribute.t))
        for inner in attribute.g.node:
            widen(inner)


# The kinds register themselves when their modules are imported.
for path in sorted(Path(__file__).parent.glob("kinds_*.py")):
    importlib.import_module(f"models.zoo.hand.{path.stem}")
