"""Turn a step that changes variables into a pure function: variables go in, their next values come out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

NodeDef = Any


@dataclass(frozen=True)
class PureStep:
    """A training step without variables.

    Attributes:
        run: the step, from one tensor for each input to a list with one for each output.
        inputs: the batch and the variables by name, each with a present value.
        outputs: the names of the outputs: those of the step, and `NAME.next` for each variable that it assigns.
    """

    run: Callable[..., list[tf.Tensor]]
    inputs: dict[str, np.ndarray]
    outputs: list[str]


def by_path(variables: Iterable[Any]) -> dict[str, tf.Variable]:
    """Return variables of Keras by their paths, with dots."""
    return {variable.path.replace("/", "."): variable.value for variable in variables}


def make_pure(
    step: Callable[..., Mapping[str, tf.Tensor]], batch: Mapping[str, np.ndarray], state: Mapping[str, tf.Variable]
) -> PureStep:
    """Trace a step, and replace its variables by inputs and outputs.

    Args:
        step: takes the batch by position, returns its outputs by name; a `tf.function`, or what can become one.
        batch: a sample of each input.
        state: the variables to make inputs. Others that the step only reads become constants.

    Raises:
        ValueError: the step writes to something that is not in `state`.
        NotImplementedError: an operator changes a variable otherwise than those of `_VARIABLE_OPS`.
    """
    function = step if hasattr(step, "get_concrete_function") else tf.function(step, autograph=False)
    specs = [tf.TensorSpec(np.shape(value), np.asarray(value).dtype, name) for name, value in batch.items()]
    traced = function.get_concrete_function(*specs)
    # The graph itself lists only variables that are read.
    known = {id(variable.handle): variable for variable in (*traced.graph.variables, *state.values())}
    resources = {inner.op.name: outer for outer, inner in traced.graph.captures if outer.dtype == tf.resource}
    if any(id(handle) not in known for handle in resources.values()):
        raise ValueError("the step writes to something that is not in the state")
    variables = {holder: known[id(handle)] for holder, handle in resources.items()}
    names = {id(variable.handle): name for name, variable in state.items()}
    name_of = {holder: names[id(each.handle)] for holder, each in variables.items() if id(each.handle) in names}
    holder_of = {name: holder for holder, name in name_of.items()}
    graph, last = _without_variables(traced.graph.as_graph_def(), variables)
    for holder, variable in variables.items():
        if holder not in name_of and last[holder] != holder:
            raise ValueError(f"the step assigns {variable.name}, which is not in the state")

    carried = [name for name in state if name in holder_of]
    following = [name for name in carried if last[holder_of[name]] != holder_of[name]]
    fixed = {inner.op.name: outer.numpy() for outer, inner in traced.graph.captures if inner.op.name not in variables}
    fixed |= {holder: variable.numpy() for holder, variable in variables.items() if holder not in name_of}
    holders = [tensor.op.name for tensor in traced.inputs[: len(specs)]] + [holder_of[name] for name in carried]
    wanted = [tensor.name for tensor in traced.outputs] + [f"{last[holder_of[name]]}:0" for name in following]

    def run(*values: tf.Tensor) -> list[tf.Tensor]:
        constants = {name: tf.constant(value) for name, value in fixed.items()}
        return tf.import_graph_def(graph, dict(zip(holders, values, strict=True)) | constants, wanted, name="")

    inputs = {name: np.asarray(value) for name, value in batch.items()}
    # A copy: the numbers of a variable on the CPU are the memory that it changes.
    inputs |= {name: np.array(state[name].numpy()) for name in carried}
    # TensorFlow flattens a dictionary by its sorted keys.
    outputs = [*sorted(traced.structured_outputs), *(f"{name}.next" for name in following)]
    return PureStep(run, inputs, outputs)


def _without_variables(graph: Any, variables: Mapping[str, tf.Variable]) -> tuple[Any, dict[str, str]]:
    """Return a graph with tensors in place of variables, and the node with the last value of each.

    The nodes of a traced graph stand in the order of the program: a value is read as the node before left it.
    """
    made = type(graph)(versions=graph.versions, library=graph.library)
    current = {holder: holder for holder in variables}
    for node in graph.node:
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
            raise NotImplementedError(f"{node.op} on the variable {variables[taken[0]].name}")
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
}


def _replace(graph: Any, node: NodeDef, kind: str, value: str, operands: list[str], indexed: bool) -> None:
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
