"""Export of a module with its loss and optimizer: trace, convert, compare, write."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from graphscale.errors import ExportError
from graphscale.exporters.comparison import Comparison
from graphscale.exporters.export_report import ExportReport
from graphscale.exporters.python_state import changed
from graphscale.exporters.pytorch import onnx_step, traced_step
from graphscale.exporters.pytorch.eager_comparison import batches_of, first_values, make_own_step
from graphscale.exporters.pytorch.example_batch import ExampleBatch, LossCall, explain
from graphscale.exporters.pytorch.half_precision import Bfloat16Watch, advice, halve, refuse_bfloat16
from graphscale.exporters.pytorch.module_tensors import parameters_of
from graphscale.exporters.pytorch.python_trials import read_state, try_python_values
from graphscale.exporters.pytorch.random_operators import generator_states
from graphscale.exporters.pytorch.refusals import refuse
from graphscale.exporters.pytorch.torch_optimizers import OTHERS, make_optimizer
from graphscale.exporters.step_file import gradient_name, remove_outputs, unique_names
from graphscale.files import saving
from graphscale.files.writing import check_output
from graphscale.process.summary import few

__all__ = ["export"]


def export(
    module: Any,
    example_batch: Any,
    loss: Any,
    optimizer: Any,
    path: str | os.PathLike[str],
    clip_norm: float | None,
    dynamic_batch: bool,
    masters: bool,
) -> ExportReport:
    """Do the work of `graphscale.exporters.pytorch.export_step`."""
    target = check_output(path)
    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"the module is of type {type(module).__name__}; pass a torch.nn.Module")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and 0 < clip_norm < math.inf):
        raise ExportError(f"clip_norm must be a number above 0; got {clip_norm!r}")
    call = LossCall(module, loss)
    batch = ExampleBatch(example_batch, call.names(example_batch))
    work = _copy(module)
    refuse_bfloat16(work, batch.tensors.values())
    if masters:
        work = halve(work)
    step = _make_step(work, module, batch, call, optimizer, clip_norm, masters)
    dynamic = _dynamic_inputs(batch) if dynamic_batch else []
    flags = {name: name in dynamic for name in step.inputs}
    try:
        graph = traced_step.trace(step, list(step.inputs.values()), list(flags.values()))
        model = onnx_step.convert(graph, step, flags)
    except ExportError:
        raise
    except Exception as error:  # PyTorch's exporters raise many kinds
        raise refuse(error, work, batch, call, advice(work, masters)) from error
    onnx_step.embed_first_values(model, step, type(module).__name__)
    comparison = Comparison(model, make_own_step(step, work, batch, call))
    batches = list(batches_of(step.batch, dynamic))
    try:
        comparison.compare(batches, first_values(step))
    except ExportError as error:
        raise ExportError(f"{error}{advice(work, masters)}") from error
    remove_outputs(model, map(gradient_name, step.weights))
    saving.save(model, target)
    reads_rate = traced_step.RATE in model.graph.initializers
    return ExportReport(
        path=os.fspath(path),
        framework=f"PyTorch {torch.__version__}",
        nodes=len(model.graph),
        inputs=tuple(batch.tensors),
        states=len(step.carried),
        steps=len(batches),
        errors=comparison.errors,
        notes=(*_notes(step, batch, dynamic, reads_rate), *comparison.notes),
    )


def _notes(step: traced_step.StepFunction, batch: ExampleBatch, dynamic: list[str], reads_rate: bool) -> Iterator[str]:
    """Yield facts about the step that its user should know."""
    rate = f"; learning_rate is {step.optimizer.learning_rate:g} where it is not fed" if reads_rate else ""
    yield f"the optimizer is {step.optimizer.label}{rate}"
    fixed = [name for name in batch.tensors if name not in dynamic]
    if fixed:
        yield f"of fixed size: {', '.join(fixed)}"
    if not step.masters and any(value.dtype == torch.float16 for value in step.weights.values()):
        yield "weights are updated in float16, which loses small updates; masters=True carries float32 masters"
    if step.constants:
        yield f"{len(step.constants)} parameters and buffers are constants, such as {next(iter(step.constants))}"
    yield from step.notes
    if step.random_state is not None:
        yield "random numbers follow from the carried input random_state, not from PyTorch's generator"


def _copy(module: Any) -> Any:
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # whatever the module holds
        kept = [
            f"{name}.{key}".lstrip(".")
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, torch.Tensor) and not value.is_leaf
        ]
        advice = (
            f"it keeps a tensor that it computed ({few(kept)}); delete it or keep its .detach(), or use weight_norm of "
            "torch.nn.utils.parametrizations"
            if "graph leaves" in str(error)
            else explain(error)
        )
        raise ExportError(f"the module cannot be copied: {advice}") from error


def _make_step(
    work: Any, module: Any, batch: ExampleBatch, call: LossCall, optimizer: Any, clip_norm: float | None, masters: bool
) -> traced_step.StepFunction:
    """Try the forward and the backward pass once, and put the step together."""
    trained, others = traced_step.split_tensors(work)
    if not trained:
        raise ExportError("the module has no parameter that requires a gradient; nothing can be trained")
    forward = traced_step.Forward(work, batch, call)
    seed = torch.tensor(torch.initial_seed() % 2**31)
    generators = generator_states()
    first = read_state(forward.module, call.loss)

    def run(forward: traced_step.Forward) -> traced_step.ForwardResult:
        return forward(batch.tensors, {**trained, **others}, seed, list(trained))

    try:
        with Bfloat16Watch() as watch:
            tried = run(forward)
    except ExportError as error:
        if error.__cause__ is None:  # graphscale refuses what the module does in any type
            raise
        raise ExportError(f"{error}{advice(work, masters)}") from error
    if watch.has_found:
        raise ExportError(
            "the module or the loss computes in bfloat16, which needs no loss scale, and for which ONNX Runtime has no "
            "kernels on a CPU; leave out torch.autocast, and pass masters=True for float16"
        )
    drawn = [name for name, state in generator_states().items() if state != generators[name]]
    after = read_state(forward.module, call.loss)
    drawn += [f"the generator {each.name}" for each in changed(first, after) if each.kind == "generator"]
    if names := tried.random.refused + drawn:
        raise ExportError(
            f"the step draws random numbers by {names[0]}, which has no counterpart in a step; draw them outside and "
            "pass them in the batch"
        )
    notes = list[str]()
    if after != first:
        notes = try_python_values(first, after, lambda: traced_step.Forward(work, batch, call), call.loss, run)
    copies = {n: w.float() if masters and w.dtype == torch.float16 else w for n, w in trained.items()}
    originals = {id(parameter): name for name, parameter in parameters_of(module).items()}
    with Bfloat16Watch() as watch:
        made = make_optimizer(optimizer, {name: copies[name] for name in tried.gradients}, originals)
    if watch.has_found:
        raise ExportError(
            f"{made.label} computes in bfloat16, for which ONNX Runtime has no kernels on a CPU; {OTHERS}"
        )
    weights = {name: trained[name] for name in made.weights}
    buffers = {name: others[name] for name in others if name in tried.changed}
    step = traced_step.StepFunction(
        forward=forward,
        optimizer=made,
        clip_norm=clip_norm,
        batch=batch.tensors,
        weights=weights,
        masters={n: copies[n] for n in weights if copies[n].dtype != weights[n].dtype},
        buffers=buffers,
        constants={n: t for n, t in {**trained, **others}.items() if n not in weights and n not in buffers},
        state=made.state,
        random_state=seed if tried.random.draws else None,
        rate=torch.tensor(made.learning_rate, dtype=torch.float32),
        metrics=tuple(tried.metrics),
        notes=tuple(notes),
    )
    unique_names([*step.batch, *step.carried, traced_step.RATE, *step.constants, *step.outputs])
    return step


def _dynamic_inputs(batch: ExampleBatch) -> list[str]:
    """Return the tensors whose first axis has the size of the batch, that of the first tensor."""
    sizes = {name: tensor.shape[0] for name, tensor in batch.tensors.items() if tensor.dim()}
    if not sizes:
        return []
    size = next(iter(sizes.values()))
    if size < 2:
        raise ExportError(
            f"the example batch has {size} row{'s' if size != 1 else ''}, too few for a step that takes any number; "
            "pass two or more, or dynamic_batch=False"
        )
    return [name for name, own in sizes.items() if own == size]
