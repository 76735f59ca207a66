"""lint: find mistakes in the loss scaling of a training graph."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.updates import find_fused_updates
from graphscale.checks.linting import (  # noqa: F401 - importing them fills RULES
    checking,
    guarding,
    keeping,
    low_precision,
    scaling,
)
from graphscale.checks.linting.codes import CODES
from graphscale.checks.linting.keeping import UNSEEN
from graphscale.checks.linting.lint_context import RULES, LintContext
from graphscale.checks.linting.lint_report import Finding, LintReport
from graphscale.checks.translation.models import compare_models
from graphscale.collector import paused_collector
from graphscale.errors import DOCS_URL, LintError
from graphscale.graph.damage import name_damage
from graphscale.graph.inference import infer_types
from graphscale.graph.note_check import find_wrong_notes, texts_of
from graphscale.graph.stamp import is_scaled
from graphscale.graph.stamp_reading import read_stamp
from graphscale.graph.values import node_name
from graphscale.lowering.lower_model import is_lowered, lower_model, plain_form
from graphscale.operators import PREVIEW_TRAINING
from graphscale.passes.preparation import prepare
from graphscale.pipeline import Model, open_copy
from graphscale.process.stages import report_stage
from graphscale.step.training_step import Step
from graphscale.step.understanding import understand
from graphscale.step.unstamped_step import read_unstamped
from graphscale.targets import get_target

__all__ = ["RULES", "lint"]


_HINT = "somebody else scaled it: with --original FILE, its states, scale and finite flag are read from the original"


@name_damage
@paused_collector()
def lint(
    model: Model,
    *,
    scale: str | None = None,
    original: Model | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> LintReport:
    """Find mistakes in the loss scaling of a training graph, scaled or not, by graphscale or by hand.

    The graph is not changed, and no weight is read.

    Args:
        model: a path, an onnx_ir model or a ModelProto.
        scale: the name of the loss scale; None to find it.
        original: of a step that somebody else scaled, the step before scaling: then its states are the original's, and
            the loss scale and the finite flag are those that act on them.
        select: the codes to report, such as "GS201", or beginnings of codes, such as "GS2"; empty for all.
        ignore: codes, or beginnings of codes, not to report.

    Raises:
        LintError: a code does not exist, or the model is an inference graph.
        LossError: the named loss scale does not exist, or is no scalar.
        ModelFileError: the model cannot be read, is damaged, or is not in topological order.
        UnsupportedModelError: the model carries `training_info` that is more than bindings of its graph.
    """
    chosen = {code for prefix in select for code in _matching(prefix)} if select else set(CODES)
    chosen -= {code for prefix in ignore for code in _matching(prefix)}
    work, name = model, "the model"
    # A copy is needed only to replace nodes that hide the gradient path.
    if not isinstance(work, ir.Model) or _is_unprepared(work) or original is not None:
        work, name = open_copy(model)
    nodes = len(work.graph)
    found: list[Finding] = []
    if is_lowered(work):
        work, found = _read_lowered(work, name)
    if _is_unprepared(work):
        prepare(work)
    report_stage("looking for the loss scale and the carried state")
    context = LintContext(work, name, scale, None if original is None else _read_step(work, name, original))
    if context.is_inference:
        raise LintError(
            f"{name} is an inference graph: it has no gradients, no loss scale and no carried state; "
            "pass a training graph"
        )
    chosen -= {code for prefix in UNSEEN.get(context.half or "", ()) for code in _matching(prefix)}
    wanted = [find for codes, find in RULES if chosen.intersection(codes)]
    for number, find in enumerate(wanted):
        report_stage("looking for mistakes", number, len(wanted))
        found += find(context)
    order = {node_name(node): i for i, node in enumerate(context.nodes)}
    unique = {finding for finding in found if finding.code in chosen}
    return LintReport(
        findings=tuple(sorted(unique, key=lambda f: (order.get(f.node or "", -1), f.code, f.value or "", f.message))),
        loss_scale=None if context.scale is None else context.scale.value.name,
        check=None if context.check is None else context.check.value.name,
        states=len(context.states),
        gradients=len(context.unscaled),
        nodes=nodes,
        hint=_HINT if original is None and not context.step.scales and context.scale is not None else "",
    )


def _is_unprepared(model: ir.Model) -> bool:
    """Return whether `prepare` will replace nodes of a model, or complete the types of its outputs."""
    is_plain = not model.functions and PREVIEW_TRAINING not in model.opset_imports
    is_typed = all(value.dtype is not None and value.shape is not None for value in model.graph.outputs)
    return not (is_plain and is_typed) or bool(find_fused_updates(model.graph))


def _read_step(model: ir.Model, name: str, original: Model) -> Step | None:
    """Read the step of a model that somebody else scaled; None for a constant scale, which changes no step."""
    if is_scaled(model):
        raise LintError(f"{name} was scaled by graphscale; its original is for a file that somebody else scaled")
    first, _ = open_copy(original)
    prepare(first)
    infer_types(model)  # other tools leave types out
    step = read_unstamped(model, understand(first, asking=False), name)
    return None if step.scale.is_fixed else step


def _matching(prefix: str) -> list[str]:
    wanted = prefix.strip().upper()
    names = {code.name: code.code for code in CODES.values()}
    found = [code for code in CODES if wanted.startswith("GS") and code.startswith(wanted)]
    found = found or [code for name, code in names.items() if name == wanted.lower()]
    if not found:
        near = difflib.get_close_matches(prefix.strip(), [*CODES, *names], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise LintError(f"there is no lint code {prefix!r}{hint} ({DOCS_URL}lint/ lists them)")
    return found


def _read_lowered(model: ir.Model, name: str) -> tuple[ir.Model, list[Finding]]:
    """Return the plain form of a lowered model, and the differences between the model and that form lowered again.

    Raises:
        ModelFileError: its record of the plain form is missing or damaged.
    """
    stamp, plain = read_stamp(model, name), plain_form(model, name)
    again = plain.clone()
    lower_model(again, get_target(stamp.target))
    differences = compare_models(model, again, "the lowered graph").differences
    if stamp.in_place != read_stamp(again, name).in_place:
        differences.append("graphscale.in_place names other states than may share one buffer")
    differences += find_wrong_notes(model, again.doc_string, texts_of(again))
    return plain, [Finding("GS503", f"{each}: the plain form in the metadata, lowered") for each in differences[:1]]
