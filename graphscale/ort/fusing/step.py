"""One training step in one graph, from an artifact folder of ONNX Runtime's training sessions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.files.model_result import ModelResult
from graphscale.files.ort_checkpoint import Array, Checkpoint
from graphscale.files.writing import MARK_KEY
from graphscale.graph.builder import Editor
from graphscale.graph.damage import name_damage
from graphscale.graph.releases import check_versions
from graphscale.graph.values import uses_of
from graphscale.operators import MICROSOFT, written_inputs
from graphscale.ort.artifacts.folder import LAZY_RESET_GRAD, OPTIMIZER_MODEL, TRAINING_MODEL, buffer_of, read_folder
from graphscale.ort.fusing.formulas import Formula, read_optimizer
from graphscale.passes import OrderWrites, replace_training_ops
from graphscale.passes.nodes.training_optimizers import AdamW, add_sgd, clip_by_norm, make_adamw
from graphscale.passes.nodes.write_order import order_writes, write_in_place
from graphscale.process.summary import Row, few
from graphscale.targets import get_target

__all__ = ["MOMENTS", "STEP", "FusedStep", "fuse", "join_models", "set_value"]

# The step counter, and the names of a parameter's moments in a checkpoint.
STEP = "step"
MOMENTS = ("momentum0", "momentum1")


@dataclasses.dataclass(frozen=True, repr=False)
class FusedStep(ModelResult):
    """The result of `fuse`.

    Attributes:
        model: the training step.
        loss: the name of the loss, its first output.
        updates: `{output name: input name}` of the carried state: parameters, moments, the step counter and running
            statistics. Empty if the step writes them in place.
        renamed: `{wanted name: given name}` for names that the training model uses.
        replaced: `{operator: nodes}` of training operators without a kernel in stock ONNX Runtime.
    """

    model: ir.Model
    loss: str
    updates: dict[str, str]
    renamed: dict[str, str]
    replaced: dict[str, int] = dataclasses.field(default_factory=dict)

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        kept = f"{len(self.updates)}: {few(list(self.updates.values()))}" if self.updates else "written in place"
        rows: list[Row] = [("loss", self.loss), ("carried state", kept)]
        if self.replaced:
            rows.append(("replaced", ", ".join(f"{count} {op}" for op, count in self.replaced.items())))
        return f"a training step of {len(self.model.graph)} nodes", rows


@name_damage
def fuse(folder: str | os.PathLike[str], *, target: str = "onnx") -> FusedStep:
    """Turn an artifact folder into a single training step for a plain InferenceSession.

    The graph is the training model without gradient accumulation, followed by the optimizer in standard operators.
    Its inputs are the user inputs, a scalar `learning_rate`, and, each with its value from the checkpoint as an
    initializer: the parameters, the moments `NAME.momentum0` and `NAME.momentum1`, the running statistics, and the
        `step` counter, the number of steps so far. The counter is a float32, since the runtime writes no other type in
        place; it counts to 2**24, where all bias corrections have long been 1. The outputs are those of the training
    model, the loss first, and the next value of each state as `NAME.next`.

    Args:
        folder: an artifact folder from `onnxruntime.training.artifacts.generate_artifacts`.
        target: "onnx": state is fed back from outputs to inputs, and standard operators replace those of ONNX Runtime's
            training builds. "ort-training" (or "ort-training-cuda"): the step writes its state in place, for training
            without a loss scale; to scale a step, fuse it for "onnx", and scale it for any target.

    Raises:
        GraphscaleError: a file is missing or damaged, the checkpoint does not fit, or an operator or the optimizer is
            unknown.
    """
    step = join_models(folder, target)
    return dataclasses.replace(step, replaced=replace_training_ops(step.model, get_target(target)))


def join_models(folder: str | os.PathLike[str], target: str = "onnx") -> FusedStep:
    """Turn an artifact folder into a training step as `fuse` does, with its own operators."""
    chosen = get_target(target)
    found = read_folder(folder)
    checkpoint, model, name = found.checkpoint, found.models[TRAINING_MODEL], str(found.path / TRAINING_MODEL)
    check_versions(model, chosen)
    adamw, max_norms = read_optimizer(found.models[OPTIMIZER_MODEL], str(found.path / OPTIMIZER_MODEL))
    loss = next(iter(model.graph.outputs), None)
    if loss is None or not loss.name or loss.dtype not in (None, ir.DataType.FLOAT):
        raise UnsupportedModelError(f"{name}: the first output must be the loss, a float32 scalar")
    gradients, statistics = _open_training_model(model.graph, checkpoint.trainable, checkpoint.frozen, name)
    editor = Editor(model.graph)
    states = _add_optimizer(Formula(editor), gradients, checkpoint, adamw, max_norms) | statistics
    if chosen.in_place:
        _write_in_place(editor, states)
        updates = {}
    else:
        for state, value in states.items():
            editor.output(value, f"{state.name}.next")
        updates = {value.name or "": state.name or "" for state, value in states.items()}
    model.metadata_props[MARK_KEY] = version("graphscale")
    return FusedStep(model, loss.name, updates, dict(editor.renamed))


def _open_training_model(
    graph: ir.Graph, trainable: Mapping[str, Array], frozen: Mapping[str, Array], name: str
) -> tuple[dict[ir.Value, ir.Value], dict[ir.Value, ir.Value]]:
    """Bind a training model to the values of a checkpoint, and remove its gradient accumulation.

    Trainable parameters and running statistics become initializers that are graph inputs too; other frozen
    parameters become constants. Each trainable parameter is an input of its shape and dtype.

    Returns:
        `{trainable parameter: its gradient}`, in the order of the inputs; `{running statistic: its next value}`.

    Raises:
        UnsupportedModelError: a gradient is not accumulated, or a parameter is not float32.
    """
    inputs = {value.name: value for value in graph.inputs}
    for key, array in (*trainable.items(), *frozen.items()):
        if key in inputs:
            set_value(inputs[key], array)
    parameters = [value for value in graph.inputs if value.name in trainable]
    gradients = {parameter: _without_accumulator(graph, parameter, inputs, name) for parameter in parameters}
    _drop_input(graph, inputs[LAZY_RESET_GRAD], name)
    constants = [value for value in graph.inputs if value.name in frozen]
    for value in (*parameters, *constants):
        graph.register_initializer(value)
    statistics = _statistics(graph, set(constants))
    for value in constants:
        if value not in statistics:
            graph.inputs.remove(value)
    return gradients, statistics


def set_value(value: ir.Value, array: Array) -> None:
    """Set the tensor of a value, and its type and shape."""
    tensor = ir.tensor(array, name=value.name)
    value.shape, value.type, value.const_value = ir.Shape(array.shape), ir.TensorType(tensor.dtype), tensor


def _without_accumulator(
    graph: ir.Graph, parameter: ir.Value, inputs: Mapping[str | None, ir.Value], name: str
) -> ir.Value:
    """Remove the accumulator of a parameter's gradient with its buffer, and return the gradient."""
    buffer = inputs[buffer_of(parameter.name or "")]
    uses = uses_of(buffer)
    node = uses[0].node if len(uses) == 1 else None
    if node is None or (node.domain, node.op_type) != (MICROSOFT, "InPlaceAccumulatorV2"):
        raise UnsupportedModelError(
            f"{name}: the gradient of {parameter.name!r} is not accumulated in an input "
            f"{buffer.name!r} by InPlaceAccumulatorV2, as generate_artifacts makes it"
        )
    gradient = node.inputs[1]
    if gradient is None or gradient.producer() is None:
        raise UnsupportedModelError(f"{name}: no gradient of {parameter.name!r} is computed")
    if parameter.dtype is not ir.DataType.FLOAT:
        raise UnsupportedModelError(f"{name}: parameter {parameter.name!r} is {parameter.dtype}, and must be float32")
    for output in node.outputs:
        if output.is_graph_output():
            graph.outputs.remove(output)
    graph.remove(node, safe=True)
    _drop_input(graph, buffer, name)
    gradient.type = gradient.type or ir.TensorType(ir.DataType.FLOAT)
    gradient.shape = gradient.shape or parameter.shape
    return gradient


def _drop_input(graph: ir.Graph, value: ir.Value, name: str) -> None:
    if value.uses():
        raise UnsupportedModelError(f"{name}: {value.name!r} is read by more than the gradient accumulation")
    graph.inputs.remove(value)


def _statistics(graph: ir.Graph, frozen: set[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Find the running statistics that operators write into a frozen parameter, each with its next value.

    The operator writes into a copy, so that the present value is unchanged during the step.
    """
    found: dict[ir.Value, ir.Value] = {}
    for node in tuple(graph):
        for index, output in written_inputs(node).items():
            state = node.inputs[index] if index < len(node.inputs) else None
            if state in frozen and state is not None and output < len(node.outputs) and node.outputs[output].name:
                found[state] = node.outputs[output]
                # Sum of one operand copies; Identity would share the buffer.
                held = ir.Value(name=f"{state.name}.copy", type=state.type, shape=state.shape)
                node.replace_input_with(index, held)
                graph.insert_before(node, ir.node("Sum", [state], outputs=[held], name=f"{state.name}/copy"))
    return found


def _add_optimizer(
    f: Formula, gradients: dict[ir.Value, ir.Value], checkpoint: Checkpoint, adamw: AdamW | None, max_norms: list[float]
) -> dict[ir.Value, ir.Value]:
    """Append an optimizer to an open training model, and return its states, each with its next value."""
    editor = f.editor
    rate = ir.val(editor.unique("learning_rate", report=True), ir.DataType.FLOAT, [])
    # Its place is after the user's inputs, before the state.
    first = next(i for i, value in enumerate(editor.graph.inputs) if value.is_initializer())
    editor.graph.inputs.insert(first, rate)
    group = next(iter(checkpoint.groups.values()), None)
    step = editor.state(STEP, np.asarray(0 if group is None else group.step, dtype=np.float32))
    this_step = f("step.sum", "Add", step, 1.0)
    clipped = list(gradients.values())
    for max_norm in max_norms:
        clipped = clip_by_norm(f, clipped, max_norm)
    rule = None if adamw is None else make_adamw(f, adamw, rate, this_step)
    states: dict[ir.Value, ir.Value] = {}
    moments: dict[ir.Value, ir.Value] = {}
    for weight, gradient in zip(gradients, clipped, strict=True):
        if rule is None:
            states[weight] = add_sgd(f, rate, weight, gradient)
        else:
            held = {} if group is None else group.moments.get(weight.name or "", {})
            one, other = (_add_moment(editor, weight, key, held.get(key)) for key in MOMENTS)
            states[weight], moments[one], moments[other] = rule(f, weight, gradient, one, other)
    return {**states, **moments, step: this_step}


def _add_moment(editor: Editor, weight: ir.Value, key: str, array: Array | None) -> ir.Value:
    assert weight.shape is not None
    dims = weight.shape.numpy()
    array = np.zeros(dims, dtype=np.float32) if array is None else array
    if array.shape != dims or array.dtype != np.float32:
        raise UnsupportedModelError(
            f"the checkpoint's {key} of {weight.name!r} is {array.dtype}{list(array.shape)}, and the parameter "
            f"float32{list(dims)}"
        )
    return editor.state(f"{weight.name}.{key}", array)


def _write_in_place(editor: Editor, states: Mapping[ir.Value, ir.Value]) -> None:
    """Assign each state its next value in the graph, after all readers of the present one."""
    build = editor.builder("fuse", is_marked=False)
    for state, value in states.items():
        if state.dtype is not ir.DataType.FLOAT:
            raise UnsupportedModelError(f"{state.name!r} is {state.dtype}; only float32 state can be written in place")
        write_in_place(build, state, value, "optimizer/overwrite")
    order_writes(OrderWrites.builder(editor))
