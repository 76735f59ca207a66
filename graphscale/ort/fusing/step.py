"""One training step in one graph, from an artifact folder of ONNX Runtime's training sessions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.files.model_files import ModelResult
from graphscale.files.ort_checkpoint import Array, Checkpoint
from graphscale.files.replacing import MARK_KEY
from graphscale.graph.builder import Editor
from graphscale.graph.diagnosis import name_damage
from graphscale.ort.artifacts.folder import OPTIMIZER_MODEL, TRAINING_MODEL, read_folder
from graphscale.ort.fusing.formulas import Formula, add_sgd, clip_by_norm, make_adamw
from graphscale.ort.fusing.optimizer_model import AdamW, read_optimizer
from graphscale.ort.fusing.training_model import open_training_model
from graphscale.passes import OrderWrites
from graphscale.passes.nodes.write_order import order_writes, write_in_place
from graphscale.targets import check_versions, get_target

__all__ = ["MOMENTS", "STEP", "FusedStep", "fuse"]

# The step counter, and what a checkpoint calls the moments of a parameter.
STEP = "step"
MOMENTS = ("momentum0", "momentum1")


@dataclasses.dataclass(frozen=True)
class FusedStep(ModelResult):
    """The result of `fuse`.

    Attributes:
        model: the training step.
        loss: the name of the loss, its first output.
        updates: `{output name: input name}` of the carried state: parameters, moments, the step counter and running
            statistics. Empty if the step writes them in place.
        renamed: `{wanted name: given name}` for names that the training model had taken.
    """

    model: ir.Model
    loss: str
    updates: dict[str, str]
    renamed: dict[str, str]


@name_damage
def fuse(folder: str | os.PathLike[str], *, target: str = "onnx") -> FusedStep:
    """Turn an artifact folder into a single training step for a plain InferenceSession.

    The graph is the training model without gradient accumulation, followed by the optimizer in standard operators.
    Its inputs are the user inputs, a scalar `learning_rate`, and, each with its value from the checkpoint as an
    initializer: the parameters, the moments `NAME.momentum0` and `NAME.momentum1`, the running statistics, and the
    `step` counter, the number of steps done so far. The counter is a float32, for the runtime writes no other type in
    place; it counts to 2**24, where all bias corrections have long been 1. The outputs are those of the training
    model, the loss first, and the next value of each state as `NAME.next`.

    Args:
        folder: an artifact folder, as `onnxruntime.training.artifacts.generate_artifacts` writes it.
        target: "onnx": state goes from output to input. "ort-training" (or "ort-training-cuda"): the step writes its
            state in place, for training without a loss scale; to scale a step, fuse it for "onnx", and scale it for
            any target.

    Raises:
        GraphscaleError: a file is missing or damaged, the checkpoint does not fit, or the optimizer is of a kind that
            is not known.
    """
    chosen = get_target(target)
    found = read_folder(folder)
    checkpoint, model, name = found.checkpoint, found.models[TRAINING_MODEL], str(found.path / TRAINING_MODEL)
    check_versions(model, chosen)
    adamw, max_norms = read_optimizer(found.models[OPTIMIZER_MODEL], str(found.path / OPTIMIZER_MODEL))
    loss = next(iter(model.graph.outputs), None)
    if loss is None or not loss.name or loss.dtype not in (None, ir.DataType.FLOAT):
        raise UnsupportedModelError(f"{name}: the first output must be the loss, a float32 scalar")
    gradients, statistics = open_training_model(model.graph, checkpoint.trainable, checkpoint.frozen, name)
    editor = Editor(model.graph)
    states = _add_optimizer(editor, gradients, checkpoint, adamw, max_norms) | statistics
    if chosen.in_place:
        _write_in_place(editor, states)
        updates = {}
    else:
        for state, value in states.items():
            editor.output(value, f"{state.name}.next")
        updates = {value.name or "": state.name or "" for state, value in states.items()}
    model.metadata_props[MARK_KEY] = version("graphscale")
    return FusedStep(model, loss.name, updates, dict(editor.renamed))


def _add_optimizer(
    editor: Editor,
    gradients: Mapping[ir.Value, ir.Value],
    checkpoint: Checkpoint,
    adamw: AdamW | None,
    max_norms: Sequence[float],
) -> dict[ir.Value, ir.Value]:
    """Append an optimizer to an open training model, and return its states, each with its next value."""
    f = Formula(editor)
    rate = ir.val(editor.unique("learning_rate", report=True), ir.DataType.FLOAT, [])
    # After the user's inputs, before the state.
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
            states[weight], moments[one], moments[other] = rule(weight, gradient, one, other)
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
    """Let the graph assign each state its next value, after all readers of the present one."""
    build = editor.builder("fuse", is_marked=False)
    for state, value in states.items():
        if state.dtype is not ir.DataType.FLOAT:
            raise UnsupportedModelError(f"{state.name!r} is {state.dtype}; only float32 state can be written in place")
        write_in_place(build, state, value, "optimizer/overwrite")
    order_writes(OrderWrites.builder(editor))
