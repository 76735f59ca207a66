"""One training step in one graph, from an artifact folder of ONNX Runtime's training sessions."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.files.model_files import ModelResult
from graphscale.files.ort_checkpoint import Checkpoint
from graphscale.graph.builder import Editor, shape_like
from graphscale.graph.diagnosis import name_damage
from graphscale.ort.artifacts.folder import CHECKPOINT, OPTIMIZER_MODEL, TRAINING_MODEL, read_folder
from graphscale.ort.fusing.formulas import AdamWRule, Formula, clip_by_norm
from graphscale.ort.fusing.in_place import write_states_in_place
from graphscale.ort.fusing.optimizer_model import AdamW, read_optimizer
from graphscale.ort.fusing.training_model import OpenModel, open_training_model
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
    checkpoint, model, name = found.checkpoint, found.training, str(found.path / TRAINING_MODEL)
    if checkpoint.nominal:
        raise UnsupportedModelError(f"{found.path / CHECKPOINT} is nominal: its parameters have no values")
    check_versions(model, chosen)
    rule = read_optimizer(found.optimizer, str(found.path / OPTIMIZER_MODEL))
    loss = _loss(model, name)
    opened = open_training_model(model, checkpoint.trainable, checkpoint.frozen, name)
    editor = Editor(model.graph)
    builder = _Builder(editor, opened, checkpoint)
    for max_norm in rule.max_norms:
        builder.clip(max_norm)
    if isinstance(rule.rule, AdamW):
        builder.adamw(rule.rule)
    else:
        builder.sgd()
    states = {**builder.states, **opened.statistics}
    if chosen.in_place:
        write_states_in_place(editor, states)
        updates = {}
    else:
        for state, value in states.items():
            editor.output(value, f"{state.name}.next")
        updates = {value.name or "": state.name or "" for state, value in states.items()}
    return FusedStep(model, loss, updates, dict(editor.renamed))


def _loss(model: ir.Model, name: str) -> str:
    loss = next(iter(model.graph.outputs), None)
    if loss is None or not loss.name or loss.dtype not in (None, ir.DataType.FLOAT):
        raise UnsupportedModelError(f"{name}: the first output must be the loss, a float32 scalar")
    return loss.name


class _Builder:
    """Appends the optimizer to an open training model; `states` maps each state to its next value."""

    def __init__(self, editor: Editor, opened: OpenModel, checkpoint: Checkpoint) -> None:
        self._editor, self._f = editor, Formula(editor)
        self._parameters, self._gradients = list(opened.gradients), list(opened.gradients.values())
        self._rate = ir.val(editor.unique("learning_rate", report=True), ir.DataType.FLOAT, [])
        # After the user's inputs, before the state.
        first = next(i for i, value in enumerate(editor.graph.inputs) if value.is_initializer())
        editor.graph.inputs.insert(first, self._rate)
        group = next(iter(checkpoint.groups.values()), None)
        self._moments: dict[str, dict[str, np.ndarray[Any, Any]]] = {} if group is None else dict(group.moments)
        count = np.asarray(0 if group is None else group.step, dtype=np.float32)
        self._step = editor.state(STEP, count)
        self._this_step = self._f("step.sum", "Add", self._step, 1.0)
        self.states: dict[ir.Value, ir.Value] = {}

    def clip(self, max_norm: float) -> None:
        self._gradients = clip_by_norm(self._f, self._gradients, max_norm)

    def sgd(self) -> None:
        f = self._f
        for weight, gradient in zip(self._parameters, self._gradients, strict=True):
            move = f(f"{weight.name}.move", "Mul", gradient, self._rate, like=weight)
            self.states[weight] = f(f"{weight.name}.moved", "Sub", weight, move, like=weight)
        self.states[self._step] = self._this_step

    def adamw(self, options: AdamW) -> None:
        rule = AdamWRule(self._f, options, self._rate, self._this_step)
        moved: dict[ir.Value, ir.Value] = {}
        for weight, gradient in zip(self._parameters, self._gradients, strict=True):
            first, second = (self._moment(weight, key) for key in MOMENTS)
            self.states[weight], moved[first], moved[second] = rule(weight, gradient, first, second)
        self.states.update(moved)
        self.states[self._step] = self._this_step

    def _moment(self, weight: ir.Value, key: str) -> ir.Value:
        shape = shape_like(weight)
        assert shape is not None
        dims = tuple(int(n) for n in shape.numpy())
        array = self._moments.get(weight.name or "", {}).get(key)
        if array is None:
            array = np.zeros(dims, dtype=np.float32)
        if array.shape != dims or array.dtype != np.float32:
            raise UnsupportedModelError(
                f"the checkpoint's {key} of {weight.name!r} is {array.dtype}{list(array.shape)}, and the parameter "
                f"float32{list(dims)}"
            )
        return self._editor.state(f"{weight.name}.{key}", array)
