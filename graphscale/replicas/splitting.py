"""split: a scaled step as two models, cut at the gradients, which replicas reduce in between."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.collector import paused_collector
from graphscale.errors import SplitError
from graphscale.files import saving, writing
from graphscale.graph.builder import Builder, Editor, replace_reads
from graphscale.graph.damage import name_damage
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.graph.stamp import SPLIT_KEY, Stamp
from graphscale.graph.values import uses_of
from graphscale.lowering.lower_model import plain_form
from graphscale.pipeline import Model, ScaledModel, open_copy
from graphscale.policy.names import ScaledValue
from graphscale.process.stages import report_stage
from graphscale.process.summary import Row, Summary, few
from graphscale.replicas.buckets import BUCKET_BYTES, Bucket, Gradient, bucket_size, in_stages, lay_out
from graphscale.replicas.cut import Cut, find_cut
from graphscale.replicas.halves import (
    MARK,
    REPLICAS_FINITE,
    add_common_decision,
    cut_stages,
    extract,
    gradients_of,
    know_types,
)
from graphscale.step.scaled_step import read

__all__ = ["SPLIT_KEY", "Halves", "SplitReport", "SplitStep", "cut_halves", "open_step", "split", "stage_path"]


@dataclasses.dataclass(frozen=True, repr=False)
class SplitReport(Summary):
    """The result of splitting a step.

    Attributes:
        gradients: `{name: shape}` of the cut values, in the order of the backward pass.
        buckets: name, dtype, elements, bytes and stage of each, and its segments `[gradient, begin, end]`.
        stages: number of models that make up the first half.
        nodes: the number of nodes of each stage, and of the second half, without those that pack and unpack buckets.
        average: outputs of the first half that replicas average, like gradients: scalar metrics, running statistics.
        local: values that the first half passes to the second unchanged.
        outputs: the outputs of the step that the first half computes; the second computes all others.
    """

    gradients: dict[str, list[int]]
    buckets: tuple[dict[str, Any], ...]
    stages: int
    nodes: tuple[int, ...]
    average: tuple[str, ...]
    local: tuple[str, ...]
    outputs: tuple[str, ...]

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        size = sum(bucket["bytes"] for bucket in self.buckets)
        *first, second = self.nodes
        return f"{self.stages} {'stage' if self.stages == 1 else 'stages'} and an update", [
            ("gradients", f"{len(self.gradients)}: {few(list(self.gradients))}"),
            ("buckets", f"{len(self.buckets)}, {size:,} bytes"),
            ("nodes", f"{few(first)} in the first half, {second} in the second"),
            ("averaged", few(self.average)),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, repr=False)
class SplitStep(Summary):
    """The result of `split`.

    Attributes:
        gradients: the first half: one model per stage, each with results of earlier stages as inputs.
        update: the second half.
        report: the result of the split.
    """

    gradients: tuple[ir.Model | onnx.ModelProto, ...]
    update: ir.Model | onnx.ModelProto
    report: SplitReport

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        return self.report._summarize()

    def save(self, gradients: str | os.PathLike[str], update: str | os.PathLike[str]) -> None:
        """Write all models or none: stage 2 of `grads.onnx` is `grads.2.onnx`, and so on.

        Raises:
            OutputError: a folder does not exist, or cannot be written; existing files are unchanged.
        """
        paths = [stage_path(gradients, i) for i in range(len(self.gradients))]
        for path in (*paths, update):
            writing.check_new_output(path, named=path not in paths[1:])
        if len({Path(path).absolute() for path in (*paths, update)}) <= len(paths):
            raise SplitError(f"the two halves cannot both be written to {os.fspath(update)}; give them two names")
        saving.save_all((*self.gradients, self.update), (*paths, update))


@dataclasses.dataclass(frozen=True)
class Halves:
    """A step in two halves, with gradients as separate values, which a session binds to its buckets.

    Attributes:
        stamp: the scaling as the step's metadata record it.
        stages: the first half.
        update: the second half.
        gradients: the cut values, in the order of the backward pass.
        groups: the gradients by their stage.
        cut: the cut.
    """

    stamp: Stamp
    stages: tuple[ir.Model, ...]
    update: ir.Model
    gradients: tuple[Gradient, ...]
    groups: tuple[tuple[Gradient, ...], ...]
    cut: Cut


def stage_path(path: str | os.PathLike[str], stage: int) -> Path:
    """Return the path of a stage, counted from 0, for a first one at `path`."""
    first = Path(path)
    return first if stage == 0 else first.with_name(f"{first.stem}.{stage + 1}{first.suffix}")


@name_damage
@paused_collector()
def split(
    step: Model | ScaledModel, *, bucket_bytes: int | str = BUCKET_BYTES, stages: int = 1, pack_buckets: bool = True
) -> SplitStep:
    """Cut a scaled step at its gradients. The given model is not changed.

    The first half computes the unscaled gradients, and returns them in buckets: flattened, in sequence, in the order of
    the backward pass. Between the halves, the caller reduces them over replicas, to their mean. The second half checks
    the buckets, updates the loss scale and applies the guarded update. Its input `replicas_finite`, true by default,
    must be false if a replica's gradients are not finite.

    Args:
        step: a scaled step with its optimizer inside: a path, the result of `scale`, or a model.
        bucket_bytes: the largest size of a bucket: bytes, or a text like "25MiB".
        stages: number of models of the first half: the buckets of one can be reduced while the next one runs.
        pack_buckets: True for buckets; else every gradient is an output and an input under its own name.

    Raises:
        ModelFileError: the model carries no loss scale.
        SplitError: the step has no updates, or cannot be cut, or not into these buckets and stages.
    """
    if isinstance(step, ScaledModel):
        step = step.model
    nbytes = bucket_size(bucket_bytes)
    model, name = open_step(step)
    report_stage("cutting the step at its gradients")
    halves = cut_halves(model, name, stages)
    buckets = lay_out(halves.groups, nbytes)
    report = _report(halves, buckets)
    if pack_buckets:
        by_name = {gradient.name: gradient for gradient in halves.gradients}
        for i, stage in enumerate(halves.stages):
            _pack(stage.graph, [bucket for bucket in buckets if bucket.stage == i], by_name)
        _unpack(halves.update.graph, buckets, by_name)
    _stamp(halves, report)
    models: list[Any] = [*halves.stages, halves.update]
    if isinstance(step, onnx.ModelProto):
        models = [ir.to_proto(model) for model in models]
    return SplitStep(tuple(models[:-1]), models[-1], report)


def open_step(step: Model) -> tuple[ir.Model, str]:
    """Return a copy of a step, and its name for messages.

    Raises:
        ModelFileError: the step cannot be read. SplitError: the step is a half already.
    """
    model, name = open_copy(step)
    if SPLIT_KEY in model.metadata_props:
        raise SplitError(f"{name} is one half of a split step; give the whole step")
    return plain_form(model, name), name


def cut_halves(model: ir.Model, name: str, stages: int = 1) -> Halves:
    """Cut a step, and possibly change it; see `split`."""
    step = read(model, name)
    stamp, cut = step.stamp, find_cut(step, name)
    know_types(model, [*cut.gradients, *cut.average, *cut.local])
    states = stamp.carried
    model.metadata_props.pop(ORIGINAL_KEY, None)
    update, given = extract(model, cut.second, cut.kept, states, keep_states=True)
    # A value that is an input and an output of the second half has two names: that of the input is the same in both
    # halves.
    cut = cut.renamed(given)
    for value in (value for node in model.graph for value in node.outputs if value.name in given):
        value.name = given[value.name or ""]
    gradients = gradients_of(model, cut.gradients)
    groups = in_stages(gradients, stages)
    models = cut_stages(model, cut, groups, states)
    if (decision := stamp.names.get(ScaledValue.ALL_FINITE)) is not None:
        add_common_decision(update.graph, decision)
    return Halves(stamp, models, update, tuple(gradients), tuple(tuple(group) for group in groups), cut)


def _report(halves: Halves, buckets: Sequence[Bucket]) -> SplitReport:
    return SplitReport(
        gradients={gradient.name: list(gradient.shape) for gradient in halves.gradients},
        buckets=tuple(
            {
                "name": bucket.name,
                "dtype": bucket.dtype.name,
                "elements": bucket.elements,
                "bytes": bucket.elements * int(bucket.dtype.itemsize),
                "stage": bucket.stage,
                "segments": [list(dataclasses.astuple(segment)) for segment in bucket.segments],
            }
            for bucket in buckets
        ),
        stages=len(halves.stages),
        nodes=tuple(len(model.graph) for model in (*halves.stages, halves.update)),
        average=halves.cut.average,
        local=halves.cut.local,
        outputs=halves.cut.outputs,
    )


def _stamp(halves: Halves, report: SplitReport) -> None:
    """Stamp the halves: both carry the loss scale, only the second carries state."""
    for i, model in enumerate(halves.stages):
        first = {**halves.stamp.report, "state": []}
        model.metadata_props[SPLIT_KEY] = json.dumps({"half": "gradients", "stage": i, **report.to_dict()})
        dataclasses.replace(halves.stamp, state={}, report=first).write(model)
    decision = REPLICAS_FINITE if ScaledValue.ALL_FINITE in halves.stamp.names else None
    second = {"half": "update", "replicas_finite": decision, **report.to_dict()}
    halves.update.metadata_props[SPLIT_KEY] = json.dumps(second)
    halves.stamp.write(halves.update)


def _pack(graph: ir.Graph, buckets: Sequence[Bucket], gradients: Mapping[str, Gradient]) -> None:
    """Replace gradients by buckets in the outputs of the first half, or of a stage.

    Before: `dw (output), db (output)`
    After:  `gradients.0 = Concat(Reshape(dw, [-1]), Reshape(db, [-1]))`
    """
    build = Editor(graph).builder(MARK)
    values = {value.name: value for value in graph.outputs}
    flat: dict[str, ir.Value] = {}
    results = []
    for bucket in buckets:
        parts = []
        for segment in bucket.segments:
            name, gradient = segment.gradient, gradients[segment.gradient]
            if name not in flat:
                operands, shape = [values[name], _numbers(build.editor, [-1])], [gradient.elements]
                flat[name] = build.op("Reshape", operands, name=f"{name}.flat", dtype=gradient.dtype, shape=shape)
            is_whole = segment.end - segment.begin == gradient.elements
            parts.append(flat[name] if is_whole else _slice(build, flat[name], segment.begin, segment.end))
        results.append(build.op("Concat", parts, name=bucket.name, dtype=bucket.dtype, shape=[bucket.elements], axis=0))
    rest = [value for value in graph.outputs if value.name not in flat]
    graph.outputs.clear()
    graph.outputs.extend([*results, *rest])


def _unpack(graph: ir.Graph, buckets: Sequence[Bucket], gradients: Mapping[str, Gradient]) -> None:
    """Replace gradients by buckets in the inputs of the second half.

    Before: `dw (input), db (input)`
    After:  `dw = Reshape(Slice(gradients.0, 0, 640), [10, 64]); db = Reshape(Slice(gradients.0, 640, 650), [10])`
    """
    editor = Editor(graph)
    build = editor.builder(MARK)
    old = {value.name or "": value for value in graph.inputs if value.name in gradients}
    parts: dict[str, list[ir.Value]] = {}
    inputs = []
    for bucket in buckets:
        whole = ir.val(editor.unique(bucket.name), bucket.dtype, [bucket.elements])
        inputs.append(whole)
        begin = 0
        for segment in bucket.segments:
            end = begin + segment.end - segment.begin
            part = _slice(build, whole, begin, end) if end - begin < bucket.elements else whole
            parts.setdefault(segment.gradient, []).append(part)
            begin = end
    for name, pieces in parts.items():
        gradient, before = gradients[name], old[name]
        uses = uses_of(before)
        flat = pieces[0]
        if len(pieces) > 1:
            flat = build.op(
                "Concat", pieces, name=f"{name}.flat", dtype=gradient.dtype, shape=[gradient.elements], axis=0
            )
        operands = [flat, _numbers(editor, gradient.shape)]
        new = build.op("Reshape", operands, name=f"{name}.reduced", dtype=gradient.dtype, shape=gradient.shape)
        replace_reads(before, new, uses)
    rest = [value for value in graph.inputs if value.name not in old]
    graph.inputs.clear()
    graph.inputs.extend([*rest, *inputs])
    graph.sort()


def _slice(build: Builder, row: ir.Value, begin: int, end: int) -> ir.Value:
    operands = [row, *(_numbers(build.editor, [place]) for place in (begin, end))]
    return build.op("Slice", operands, name=f"{row.name}.{begin}", dtype=row.dtype, shape=[end - begin])


def _numbers(editor: Editor, numbers: Sequence[int]) -> ir.Value:
    name = f"graphscale/{MARK}.{'x'.join(map(str, numbers))}"
    return editor.shared_constant(name, np.asarray(numbers, dtype=np.int64))
