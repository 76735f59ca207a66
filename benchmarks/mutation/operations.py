"""Damage to the original's own nodes: operands, attributes, operators, terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import FLOAT, Damaged
from benchmarks.mutation.kinds import kind

_Sites = Callable[[Damaged], Iterator[str]]

# --- operands ---------------------------------------------------------------------------------------------------------


def _swappable(op_type: str, first: int = 0) -> _Sites:
    def sites(d: Damaged) -> Iterator[str]:
        for name in at.of(op_type)(d):
            inputs = d.producer(name).inputs
            if inputs[first] is not inputs[first + 1]:
                yield name

    return sites


def _swap(d: Damaged, site: str, first: int) -> None:
    node = d.producer(site)
    one, other = node.inputs[first], node.inputs[first + 1]
    node.replace_input_with(first, other)
    node.replace_input_with(first + 1, one)


for _op, _first in {"Sub": 0, "Div": 0, "Pow": 0, "MatMul": 0, "Gemm": 0, "Less": 0, "Where": 1}.items():
    kind(f"swap the operands of {_op}", _swappable(_op, _first))(lambda d, site, first=_first: _swap(d, site, first))


def _with_operands(op_type: str, least: int) -> _Sites:
    def sites(d: Damaged) -> Iterator[str]:
        yield from (name for name in at.of(op_type)(d) if len(d.producer(name).inputs) >= least)

    return sites


@kind("fuse a product without its bias", _with_operands("Gemm", 3))
def _no_bias(d: Damaged, site: str) -> None:
    d.producer(site).resize_inputs(2)


@kind("drop a term of a sum", _with_operands("Sum", 2))
def _no_term(d: Damaged, site: str) -> None:
    node = d.producer(site)
    node.resize_inputs(len(node.inputs) - 1)


@kind("drop a summand", at.of("Add"))
def _no_summand(d: Damaged, site: str) -> None:
    node = d.producer(site)
    same = next((v for v in node.inputs if v is not None and v.shape == node.outputs[0].shape), node.inputs[0])
    assert same is not None
    d.replace(node.outputs[0], same)


@kind("read another input of the same type", at.batches)
def _other_input(d: Damaged, site: str) -> None:
    zero = d.make("Mul", [d.values[site], d.number(0, d.values[site].dtype)], None, d.values[site].dtype)
    d.replace(d.values[site], zero, keep=(zero.producer(),))  # type: ignore[arg-type]


# --- attributes -------------------------------------------------------------------------------------------------------


def _other_integer(d: Damaged, site: str, name: str, value: int) -> None:
    node = d.producer(site)
    old = node.attributes[name].as_int() if name in node.attributes else None
    node.attributes[name] = ir.AttrInt64(name, value if old != value else value + 1)


def _flip(d: Damaged, site: str, name: str, default: int) -> None:
    node = d.producer(site)
    old = node.attributes[name].as_int() if name in node.attributes else default
    node.attributes[name] = ir.AttrInt64(name, 1 - old)


def _other_float(d: Damaged, site: str, name: str) -> None:
    node = d.producer(site)
    old = node.attributes[name].as_float() if name in node.attributes else 1.0
    node.attributes[name] = ir.AttrFloat32(name, float(np.nextafter(np.float32(old), np.float32(np.inf))))


for _name, _ops in {"transA": ("Gemm",), "transB": ("Gemm", "FusedMatMul")}.items():
    kind(f"change {_name}", at.of(*_ops))(lambda d, site, name=_name: _flip(d, site, name, 0))
kind("change keepdims", at.of("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"))(
    lambda d, site: _flip(d, site, "keepdims", 1)
)
kind("change the axis", at.with_attribute("axis"))(lambda d, site: _other_integer(d, site, "axis", 0))
kind("change alpha by an ulp", at.of("Gemm", "LeakyRelu", "FusedMatMul"))(
    lambda d, site: _other_float(d, site, "alpha")
)
kind("change beta by an ulp", _with_operands("Gemm", 3))(lambda d, site: _other_float(d, site, "beta"))
kind("change epsilon by an ulp", at.with_attribute("epsilon"))(lambda d, site: _other_float(d, site, "epsilon"))
kind("change the type of a cast", at.with_attribute("to", "Cast"))(
    lambda d, site: _other_integer(d, site, "to", int(ir.DataType.BFLOAT16))
)


@kind("change a permutation", at.with_attribute("perm"))
def _permute(d: Damaged, site: str) -> None:
    node = d.producer(site)
    axes = [*node.attributes["perm"].as_ints()]
    node.attributes["perm"] = ir.AttrInt64s("perm", [*axes[1:], axes[0]])


@kind("change an equation", at.with_attribute("equation"))
def _equation(d: Damaged, site: str) -> None:
    node = d.producer(site)
    left, right = node.attributes["equation"].as_string().split("->")
    node.attributes["equation"] = ir.AttrString("equation", f"{left}->{right[::-1]}")


@kind("change strides or pads", at.with_attribute("pads"))
def _pads(d: Damaged, site: str) -> None:
    node = d.producer(site)
    pads = [*node.attributes["pads"].as_ints()]
    node.attributes["pads"] = ir.AttrInt64s("pads", [pads[0] + 1, *pads[1:-1], pads[-1] - 1])


@kind("drop an attribute", lambda d: (n.outputs[0].name or "" for n in at.originals(d) if n.attributes))
def _no_attribute(d: Damaged, site: str) -> None:
    attributes = d.producer(site).attributes
    attributes.pop(next(iter(attributes)))


@kind("change the seed of a dropout", at.of("Dropout"))
def _seed(d: Damaged, site: str) -> None:
    _other_integer(d, site, "seed", 17)


@kind("add an attribute of another domain", at.of("MatMul", "Gemm", "Mul"))
def _strange_attribute(d: Damaged, site: str) -> None:
    d.producer(site).attributes["strange"] = ir.AttrInt64("strange", 1)


# --- operators --------------------------------------------------------------------------------------------------------

for _old, _new in {
    "Add": "Sub",
    "Mul": "Div",
    "ReduceMean": "ReduceSum",
    "ReduceSum": "ReduceMean",
    "Max": "Min",
    "Greater": "GreaterOrEqual",
    "LessOrEqual": "Less",
    "Sqrt": "Abs",
    "Exp": "Softplus",
    "Tanh": "Sigmoid",
    "Erf": "Tanh",
    "Neg": "Identity",
    "Relu": "Identity",
    "Softmax": "LogSoftmax",
    "LogSoftmax": "Softmax",
    "Log": "Abs",
}.items():

    @kind(f"{_new} in place of {_old}", at.of(_old))
    def _other_operator(d: Damaged, site: str, new: str = _new) -> None:
        d.producer(site).op_type = new


def _of_onnx(d: Damaged) -> Iterator[str]:
    yield from (name for name in at.of("Gelu", "MatMul", "Gemm", "Relu")(d) if not d.producer(name).domain)


@kind("a node of another domain", _of_onnx)
def _domain(d: Damaged, site: str) -> None:
    d.producer(site).domain = "com.microsoft"
    d.model.opset_imports["com.microsoft"] = 1


@kind("a node of another overload", at.of("MatMul", "Gemm", "Mul"))
def _overload(d: Damaged, site: str) -> None:
    d.producer(site).overload = "other"


# --- small numbers ----------------------------------------------------------------------------------------------------

kind("add 1e-30 to a gradient", at.gradients)(lambda d, site: d.around(d.values[site], "Add", d.number(1e-30)))
kind("a gradient off by an ulp", at.gradients)(lambda d, site: d.around(d.values[site], "Mul", d.number(1 + 2**-23)))
kind("a gradient with a floor of -1e30", at.gradients)(lambda d, site: d.around(d.values[site], "Max", d.number(-1e30)))
kind("flush what is below 1e-38 to zero", at.gradients)(lambda d, site: _flush(d, d.values[site]))


def _flush(d: Damaged, value: ir.Value) -> None:
    def flush(value: ir.Value) -> ir.Value:
        size = d.make("Abs", [value], value.producer())
        is_tiny = d.make("Less", [size, d.number(1e-38)], None, ir.DataType.BOOL)
        return d.make("Where", [is_tiny, d.number(0.0), value], None)

    d.wrap(value, flush)


@kind("a weight decay of 1e-12", at.stale_guards)
def _decay(d: Damaged, site: str) -> None:
    node = d.nodes[site]
    new, old = node.inputs[1], node.inputs[2]
    assert new is not None and old is not None
    if new.dtype is not FLOAT:
        new = d.make("Cast", [new], None, to=FLOAT)
    less = d.make("Mul", [old, d.number(1e-12, old.dtype)], None, old.dtype)
    node.replace_input_with(1, d.make("Sub", [new, less], None, new.dtype))


@kind("exchange two gradients of one shape", at.twin_gradients)
def _exchange(d: Damaged, site: str) -> None:
    one, other = at.pair_of(d, site)
    operands = [value.producer().inputs[0] for value in (one, other)]  # type: ignore[union-attr]
    one.producer().replace_input_with(0, operands[1])  # type: ignore[union-attr]
    other.producer().replace_input_with(0, operands[0])  # type: ignore[union-attr]


# --- several results --------------------------------------------------------------------------------------------------


def _several(d: Damaged) -> Iterator[str]:
    for node in at.originals(d):
        used = [value for value in node.outputs if value.uses()]
        if len(used) > 1:
            yield used[0].name or ""


@kind("exchange the results of a node", _several)
def _results(d: Damaged, site: str) -> None:
    one, other = [value for value in d.producer(site).outputs if value.uses()][:2]
    uses = [[(use.node, use.idx) for use in value.uses()] for value in (one, other)]
    for value, readers in ((other, uses[0]), (one, uses[1])):
        for node, index in readers:
            node.replace_input_with(index, value)
