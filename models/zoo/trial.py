"""Try graphscale on exported steps, and write a table: `python -m models.zoo.trial FOLDER [--out docs/project/zoo.md]`.

A step is right where the loss and all pairs of state are those of its script, and asked about where some role is open:
then the proposals are taken, all of them, unchanged; zeros that follow inputs without a reader are right in any
order. Steps right in either way are scaled and run: by 1024 for equal bits, and dynamically with each batch and each
state made NaN at one element, for a skip that changes no state; its gradients are compared with differences of its
loss. An exception that is no GraphscaleError is a wrong outcome.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import graphscale as gs
from graphscale.analysis.roles.role_table import RoleEntry
from graphscale.analysis.roles.roles_file import roles_file
from graphscale.analysis.updates import type_of
from graphscale.errors import AlreadyScaledError, GraphscaleError
from graphscale.graph.values import is_known_zero

Arrays = dict[str, np.ndarray]
OUTCOMES = ("right", "asked, proposal right", "asked, no evidence", "asked, proposal wrong", "refused", "wrong")
RUN = ("same bits", "skips", "covered")
VERDICTS = ("agree", "disagree", "cannot say")


@dataclasses.dataclass
class Outcome:
    """The outcome of one step.

    Attributes:
        name: `KIND.VARIANT`.
        outcome: one of `OUTCOMES`.
        reason: the class of the refusal, the open outputs, or what is wrong.
        checks: result of each check of `RUN`; one that could not be made is left out.
        gradients: one of `VERDICTS`, what `graphscale.check_gradients` finds; empty where it was not asked.
    """

    name: str
    outcome: str
    reason: str = ""
    checks: dict[str, bool] = dataclasses.field(default_factory=dict)
    gradients: str = ""


def try_step(path: Path) -> Outcome:
    """Try one step: its roles against the truth beside it, then its scaled graphs against itself."""
    try:
        return _try(path, json.loads(path.with_suffix(".json").read_text()), onnx.load(path))
    except GraphscaleError as error:
        return Outcome(path.stem, "refused", type(error).__name__)
    except Exception as error:
        return Outcome(path.stem, "wrong", f"it raises {type(error).__name__}")


def _try(path: Path, truth: dict[str, Any], model: onnx.ModelProto) -> Outcome:
    report = gs.inspect(model)
    found = judge(path.stem, model, report, truth)
    if found.outcome.endswith(("wrong", "no evidence")):
        return found
    roles = json.loads(roles_file(report.roles)) if found.reason else None
    checks = dict(_checks(path, model, truth, roles, report.coverage))
    return dataclasses.replace(found, checks=checks, gradients=_verdict(path, model, roles))


def judge(name: str, model: onnx.ModelProto, report: gs.Report, truth: dict[str, Any]) -> Outcome:
    """Hold the loss and the pairs of a report against the truth: an outcome of `OUTCOMES`, without any check."""
    outputs = [entry for entry in report.roles if entry.kind == "output"]
    states = truth["states"]
    wrong = [e for e in outputs if e.pair != states.get(e.name) and not _is_idle(model, e, states.get(e.name))]
    if wrong and _exchange_idle(model, wrong, states) and _are_zeros(model, wrong):
        wrong = []
    losses = [entry for entry in outputs if entry.role == "loss" and entry.name not in truth["losses"]]
    certain = [entry.name for entry in (*wrong, *losses) if entry.certain]
    if certain:
        return Outcome(name, "wrong", ", ".join(certain))
    if losses:
        return Outcome(name, "asked, proposal wrong", ", ".join(entry.name for entry in losses))
    if wrong:
        outcome = "asked, no evidence" if _exchange_idle(model, wrong, states) else "asked, proposal wrong"
        return Outcome(name, outcome, ", ".join(entry.name for entry in wrong))
    asked = [entry.name for entry in outputs if not entry.certain]
    return Outcome(name, "asked, proposal right" if asked else "right", ", ".join(asked))


def _is_idle(model: onnx.ModelProto, entry: RoleEntry, state: str | None) -> bool:
    """Return whether an output without a pair is the next value of a state that no step reads."""
    if state is None or entry.pair is not None:
        return False
    value = ir.convenience.create_value_mapping(ir.from_proto(model).graph)[state]
    readers = [node for node, _ in value.uses()]
    return all(node.op_type == "Identity" and node.outputs[0].name == entry.name for node in readers)


def _exchange_idle(model: onnx.ModelProto, entries: Iterable[RoleEntry], states: dict[str, str]) -> bool:
    """Return whether proposals only exchange unread inputs of one type: no evidence distinguishes them."""
    values = ir.convenience.create_value_mapping(ir.from_proto(model).graph)

    def is_unread(name: str | None, like: str) -> bool:
        return name in values and not values[name].uses() and type_of(values[name]) == type_of(values[like])

    return all(is_unread(entry.pair, entry.name) and is_unread(states.get(entry.name), entry.name) for entry in entries)


def _are_zeros(model: onnx.ModelProto, entries: Iterable[RoleEntry]) -> bool:
    """Return whether outputs are all zeros: inputs that no node reads have that value next, in any order."""
    values = ir.convenience.create_value_mapping(ir.from_proto(model).graph)
    return all(is_known_zero(values[entry.name]) for entry in entries)


def _verdict(path: Path, model: onnx.ModelProto, roles: Any) -> str:
    """Return one of `VERDICTS` on the gradients of a step."""
    try:
        found = gs.check_gradients(model, dict(np.load(path.with_suffix(".npz"))), roles=roles)
    except GraphscaleError:
        return "cannot say"
    return "agree" if found.ok else "disagree" if found.count("disagrees") else "cannot say"


def _checks(
    path: Path, model: onnx.ModelProto, truth: dict[str, Any], roles: Any, coverage: float | None
) -> Iterator[tuple[str, bool]]:
    feeds = dict(np.load(path.with_suffix(".npz")))
    try:
        expected = _run(model, feeds)
    except Exception:  # a kernel is missing, whatever its kind of error
        return
    yield "covered", coverage == 1
    try:
        scaled = gs.scale(model, gs.DynamicLossScale(1.0), roles=roles).model
    except AlreadyScaledError:  # The step adjusts a loss scale of its own.
        return
    if all(_same(array, expected[name]) for name, array in _run(model, feeds).items()):
        fixed = _run(gs.scale(model, 1024.0, roles=roles).model, feeds)
        yield "same bits", all(_same(fixed[name], array) for name, array in expected.items())
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    fed = (*truth["batch"], *truth["states"].values())
    poisoned = [name for name in fed if name in feeds and feeds[name].dtype.kind == "f" and feeds[name].size]
    yield "skips", all(_skips(model, scaled, truth, {**stored, **feeds}, feeds, name) for name in poisoned)


def _skips(
    model: onnx.ModelProto, scaled: onnx.ModelProto, truth: dict[str, Any], held: Arrays, feeds: Arrays, name: str
) -> bool:
    """Return whether a step that a NaN in one input spoils changes no state."""
    spoiled = feeds[name].copy()
    spoiled.flat[0] = np.nan
    feeds = {**feeds, name: spoiled}
    states = {output: state for output, state in truth["states"].items() if output not in truth["kept"]}
    try:
        before = _run(model, feeds)
    except Exception:  # The runtime refuses the NaN in the unscaled step, too.
        return True
    after = _run(scaled, feeds)
    if after[_finite(scaled)]:
        # The moments of an optimizer are behind the gradients, which alone are tested.
        others = [before[output] for output, state in states.items() if state != name]
        return _is_finite(before[loss] for loss in truth["losses"]) or _is_finite(others)
    return all(_same(after[output], spoiled if state == name else held[state]) for output, state in states.items())


def _is_finite(arrays: Iterable[np.ndarray]) -> bool:
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def _finite(model: onnx.ModelProto) -> str:
    return next(v.name for v in reversed(model.graph.output) if v.name.startswith("all_finite"))


def _run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays are equal, element by element; a NaN equals a NaN, and -0 equals 0."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Write the table of outcomes by part of the zoo, and the steps that are not right, as Markdown."""
    head = ("", "kinds", "steps", *OUTCOMES, *RUN, f"gradients {', '.join(VERDICTS)}")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for part, found in outcomes.items():
        counts = Counter(each.outcome for each in found)
        kinds = {each.name.partition(".")[0] for each in found}
        runs = [[each.checks[check] for each in found if check in each.checks] for check in RUN]
        cells = [part, len(kinds), len(found), *(counts[o] for o in OUTCOMES), *(f"{sum(r)} of {len(r)}" for r in runs)]
        verdicts = Counter(each.gradients for each in found)
        cells.append(", ".join(str(verdicts[verdict]) for verdict in VERDICTS))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for outcome in OUTCOMES[1:]:
        groups = defaultdict(list)
        for each in (each for found in outcomes.values() for each in found if each.outcome == outcome):
            kind, _, variant = each.name.partition(".")
            groups[kind, each.reason if outcome in ("refused", "wrong") else ""].append(variant)
        lines += ["", f"**{outcome}**: "] if groups else []
        lines += [
            f"- {kind} ({', '.join(v)}){reason and ': ' + reason}" for (kind, reason), v in sorted(groups.items())
        ]
    for check in RUN:
        failed = [e.name for found in outcomes.values() for e in found if e.checks.get(check) is False]
        lines += ["", f"**not: {check}**: {', '.join(failed)}"] if failed else []
    for verdict in VERDICTS[1:]:
        named = [each.name for found in outcomes.values() for each in found if each.gradients == verdict]
        lines += ["", f"**gradients {verdict}**: {', '.join(named)}"] if named else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try the steps of a folder that `models.zoo.export` wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="a Markdown file whose part below '<!-- table -->' is written anew")
    parser.add_argument("--only", default="*", metavar="PATTERN")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = {"open": "open", "set aside": "aside"}
    outcomes = {
        part: [try_step(path) for path in sorted((chosen.folder / folder).glob(f"{chosen.only}.onnx"))]
        for part, folder in parts.items()
    }
    text = table(outcomes)
    print(text)
    if chosen.out:
        before = chosen.out.read_text(encoding="utf-8").partition("<!-- table -->")[0]
        chosen.out.write_text(f"{before}<!-- table -->\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
