"""The check of the gradients of a training graph: `graphscale.check_gradients`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.checks.derivatives.gradient_bench import open_bench
from graphscale.checks.derivatives.gradient_report import GradientCheck
from graphscale.collector import paused_collector
from graphscale.errors import UnsupportedModelError, VerifyError
from graphscale.files.tensor_files import read_npz
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp import refuse_scaled
from graphscale.passes import replace_training_ops
from graphscale.passes.preparation import prepare
from graphscale.pipeline import Model, open_copy
from graphscale.step.understanding import understand
from graphscale.targets import get_target

__all__ = ["check", "check_gradients"]


@name_damage
@paused_collector()
def check_gradients(
    model: Model,
    feeds: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    directions: int = 2,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    loss: str | Sequence[str] | None = None,
    gradients: Sequence[str] | None = None,
    updates: Mapping[str, str] | None = None,
    roles: Any = None,
) -> GradientCheck:
    """Check the gradients of a training graph against central differences of its loss.

    The gradients are the values that scaling divides by the loss scale, before any clipping. Each is compared with the
    slope of the loss along random directions of its weight, and along itself. ONNX's reference evaluator evaluates the
    graph in float64; where it lacks an operator, or with many weights, ONNX Runtime evaluates the graph in float32.

    Args:
        model: a path, an onnx_ir model or a ModelProto: a training graph without a loss scale.
        feeds: arrays for inputs by name, or an .npz file of them; other inputs are random.
        directions: number of random directions for each weight, at least 1.
        seed: the seed of the directions and the random feeds.
        dims: sizes for symbolic axes, by name; by default the size in `feeds`, else 4.
        loss: the name of the loss, or several, as given to `scale`.
        gradients: names of gradients, as given to `scale`.
        updates: `{output: input}` of carried state, as given to `scale`.
        roles: answers about roles, as given to `scale`.

    Raises:
        GraphscaleError: the model cannot be read or analysed; a `VerifyError` if it cannot be evaluated.
    """
    return check(model, feeds, Hints(loss, None, gradients or (), updates, roles), directions, seed, dims)


def check(
    model: Model,
    feeds: Mapping[str, Any] | str | os.PathLike[str] | None,
    hints: Hints,
    directions: int = 2,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
) -> GradientCheck:
    """Check gradients like `check_gradients`, with all hints to the analysis."""
    if directions < 1:
        raise VerifyError(f"directions is at least 1; got {directions}")
    given = read_npz(feeds) if isinstance(feeds, str | os.PathLike) else feeds or {}
    given = {name: np.asarray(array) for name, array in given.items()}
    work, name = open_copy(model)
    refuse_scaled(work, name)
    prepare(work)
    work = _in_standard_form(work)
    found = understand(work, hints, asking=False)
    with contextlib.closing(open_bench(found, given, dims or {}, seed)) as bench:
        checks = bench.check(directions)
        order = {value.name: i for i, value in enumerate(found.graph.inputs)}
        checks.sort(key=lambda each: order.get(each.weight, len(order)))
        return GradientCheck(found.loss.name or "", bench.dtype, tuple(checks), tuple(bench.notes))


def _in_standard_form(model: ir.Model) -> ir.Model:
    """Return a model in standard operators, for all evaluators; the model itself if an operator has none."""
    lowered = model.clone()
    try:
        replace_training_ops(lowered, get_target("onnx"))
    except UnsupportedModelError:
        return model
    return lowered
