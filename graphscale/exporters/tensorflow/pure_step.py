"""A training step as a pure function: variables go in, their next values come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphscale.errors import ExportError
from graphscale.exporters.step_file import next_name
from graphscale.exporters.tensorflow.static_shapes import simplify_node
from graphscale.files.tensor_files import Arrays

__all__ = ["PureStep", "by_path", "make_pure"]


@dataclass(frozen=True)
class PureStep:
    """A training step without variables.

    Attributes:
        run: the step, from one tensor for each input to a list with one for each output.
        specs: the batch, then the variables: shape and dtype of each input by name.
        first: present values of the variables by name.
        outputs: names of the outputs: those of the step, and `NAME.next` for each variable that it assigns.
        pairs: `NAME.next` and NAME of each variable that the step assigns.
    """

    run: Callable[..., list[Any]]
    specs: dict[str, Any]
    first: Arrays
    outputs: list[str]
    pairs: dict[str, str]


def by_path(variables: Iterable[Any], separator: str = "/") -> dict[str, Any]:
    """Return the TensorFlow variables of Keras variables by their paths."""
    return {variable.path.replace("/", separator): variable.value for variable in variables}


def make_pure(
    step: Callable[..., Mapping[str, Any]],
    batch: Mapping[str, Any],
    state: Mapping[str, Any],
    restarted: Sequence[Any] = (),
) -> PureStep:
    """Trace a step, and replace its variables by inputs and outputs.

    Args:
        step: takes the batch by position, returns its outputs by name; a `tf.function`, or a function to trace.
        batch: a `tf.TensorSpec` or an array for each input.
        state: `tf.Variable`s to make inputs. Others that the step only reads become constants.
        restarted: `tf.Variable`s that begin each step at their present values, such as the sums of a metric.

    Raises:
        ExportError: the step assigns a variable that is neither in `state` nor in `restarted`, or in a way that has no
            equivalent on tensors.
    """
    function = step if hasattr(step, "get_concrete_function") else tf.function(step, autograph=False)
    with _functions_inside():
        traced = function.get_concrete_function(*(_spec(value) for value in batch.values()))
    # The graph itself lists only variables that are read.
    known = {id(variable.handle): variable for variable in (*traced.graph.variables, *state.values(), *restarted)}
    resources = {inner.op.name: outer for outer, inner in traced.graph.captures if outer.dtype == tf.resource}
    if any(id(handle) not in known for handle in resources.values()):
        raise ExportError("the step assigns a variable that belongs to neither the model nor its optimizer")
    variables = {holder: known[id(handle)] for holder, handle in resources.items()}
    names = {id(variable.handle): name for name, variable in state.items()}
    name_of = {holder: names[id(each.handle)] for holder, each in variables.items() if id(each.handle) in names}
    holder_of = {name: holder for holder, name in name_of.items()}
    graph, last = _without_variables(traced.graph, variables)
    passing = {id(variable.handle) for variable in restarted}
    for holder, variable in variables.items():
        if holder not in name_of and last[holder] != holder and id(variable.handle) not in passing:
            raise ExportError(
                f"the step assigns the variable {variable.name}, which belongs to neither the model nor its optimizer"
            )

    carried = [name for name in state if name in holder_of]
    following = [name for name in carried if last[holder_of[name]] != holder_of[name]]
    fixed = {inner.op.name: outer.numpy() for outer, inner in traced.graph.captures if inner.op.name not in variables}
    fixed |= {holder: variable.numpy() for holder, variable in variables.items() if holder not in name_of}
    inner_batch = traced.inputs[: len(batch)]
    holders = [tensor.op.name for tensor in inner_batch] + [holder_of[name] for name in carried]
    # TensorFlow flattens a dictionary by its sorted keys.
    results = dict(zip(sorted(traced.structured_outputs), (tensor.name for tensor in traced.outputs), strict=True))
    wanted = [*results.values(), *(f"{last[holder_of[name]]}:0" for name in following)]

    def run(*values: Any) -> list[Any]:
        constants = {name: tf.constant(value) for name, value in fixed.items()}
        found: list[Any] = tf.import_graph_def(
            graph, dict(zip(holders, values, strict=True)) | constants, wanted, name=""
        )
        return found

    specs = {name: tf.TensorSpec(tensor.shape, tensor.dtype) for name, tensor in zip(batch, inner_batch, strict=True)}
    specs |= {name: tf.TensorSpec(state[name].shape, state[name].dtype) for name in carried}
    # A copy: the numbers of a variable on the CPU are the memory that it changes.
    first = {name: np.array(state[name].numpy()) for name in carried}
    pairs = {next_name(name): name for name in following}
    return PureStep(run, specs, first, [*results, *pairs], pairs)


@contextlib.contextmanager
def _functions_inside() -> Iterator[None]:
    """Write the nodes of a `tf.function` that the step calls into the step, in place of a call with variables."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _spec(value: Any) -> Any:
    if isinstance(value, tf.TensorSpec):
        return tf.TensorSpec(value.shape, value.dtype)
    array = np.asarray(value)
    return tf.TensorSpec(array.shape, array.dtype)


def _without_variables(graph: Any, variables: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return a graph with tensors in place of variables, and the node with the last value of each.

    The nodes of a traced graph stand in the order of the program: a value is read as the node before left it.
    """
    traced = graph.as_graph_def()
    made = type(traced)()
    made.CopyFrom(traced)
    made.ClearField("node")
    current = {holder: holder for holder in variables}
    for node in traced.node:
        # The order of reads and writes is in the values now.
        inputs = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        if node.name in variables:
            dtype = variables[node.name].dtype
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variables[node.name].shape.as_proto())
        elif inputs and inputs[0] in variables and node.op in _VARIABLE_OPS:
            holder = inputs[0]
            kind, writes, indexed = _VARIABLE_OPS[node.op]
            _replace(made, node, kind, current[holder], inputs[1:], indexed)
            current[holder] = node.name if writes else current[holder]
            made.node.append(node)
            continue
        elif taken := [name for name in inputs if name in variables]:
            raise ExportError(
                f"the step uses the variable {variables[taken[0]].name} in {node.op} (node {node.name}), which has no "
                "equivalent on tensors; read and assign variables outside of loops and conditions"
            )
        else:
            simplify_node(made, graph.get_operation_by_name(node.name), node)
        node.attr.pop("_output_shapes", None)
        made.node.append(node)
    return made, current


# The operator on tensors, whether its result is the variable's next value, and whether it takes rows by indices.
_VARIABLE_OPS = {
    "ReadVariableOp": ("Identity", False, False),
    "ResourceGather": ("GatherV2", False, True),
    "AssignVariableOp": ("Identity", True, False),
    "AssignAddVariableOp": ("AddV2", True, False),
    "AssignSubVariableOp": ("Sub", True, False),
    "ResourceScatterAdd": ("TensorScatterAdd", True, True),
    "ResourceScatterSub": ("TensorScatterSub", True, True),
    "ResourceScatterUpdate": ("TensorScatterUpdate", True, True),
}


def _replace(graph: Any, node: Any, kind: str, value: str, operands: list[str], indexed: bool) -> None:
    """Make a node that reads or writes a variable one of tensors; put constants that it needs before it."""
    dtype, index_dtype = node.attr["dtype"].type, node.attr["Tindices"].type
    if kind == "GatherV2":
        axis = graph.node.add(name=f"{node.name}/axis", op="Const")
        axis.attr["dtype"].type = tf.int32.as_datatype_enum
        axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
        operands = [*operands, axis.name]
    elif indexed:
        axis = graph.node.add(name=f"{node.name}/axis", op="Const")
        axis.attr["dtype"].type = tf.int32.as_datatype_enum
        axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(-1, tf.int32))
        rows = graph.node.add(name=f"{node.name}/rows", op="ExpandDims", input=[operands[0], axis.name])
        rows.attr["T"].type, rows.attr["Tdim"].type = index_dtype, tf.int32.as_datatype_enum
        operands = [rows.name, operands[1]]
    del node.input[:]
    node.input.extend([value, *operands] if kind != "Identity" or not operands else operands)
    node.op = kind
    node.attr.clear()
    if kind == "GatherV2":
        node.attr["Tparams"].type, node.attr["Tindices"].type = dtype, index_dtype
        node.attr["Taxis"].type = tf.int32.as_datatype_enum
    else:
        node.attr["T"].type = dtype
        if indexed:
            node.attr["Tindices"].type = index_dtype
