"""The table of an attack by random edits, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["REASONS", "write_table"]

_VERDICTS = ("rejected", "equal", "unloadable", "survivor", "crash")
_INNER = "Names inside of a graph are free: everything is read by its name, and all readers have the new one"
_ALIKE = "A body gives equal constants, of the same type, shape and elements, in another order"
_PROSE = "Text without a reader"
_UNREAD = "Nothing reads it"

# Why accepted edits change nothing, by kind.
REASONS = {
    "attribute: doc string, or a second value": "A documentation; a value of a field that the attribute's type, or its "
    "reference to a function's attribute, leaves unread",
    "attribute: value": "A value beside a reference to a function's attribute, which counts",
    "constant: encoding": "The same elements in other fields; documentation, metadata",
    "constant: initializer removed, added or moved": "The order of initializers",
    "constant: name": "The name of a tensor in an attribute. " + _UNREAD,
    "constant: one bit": "A constant of the original that no node reads",
    "constant: one element": "A constant of the original that no node reads",
    "constant: shape": "A constant of the original that no node reads",
    "constant: type": "A constant of the original that no node reads",
    "constant: whole": "A constant of the original that no node reads; another one of the same elements",
    "described value: removed, added, renamed": "Less is declared, or for a name that no value has; what is declared "
    "in addition must be what ONNX's inference finds",
    "described value: type or shape": "Declared for a name that no value has, or less",
    "function: removed, renamed, duplicated": "Documentation and metadata of a function",
    "graph: name, doc string, metadata, quantization": "Text without a reader; a note on quantization, which "
    "quantizers alone read",
    "interface: doc string or metadata": _PROSE,
    "interface: order": _ALIKE,
    "interface: renamed": _INNER,
    "interface: shape": "A body's input or output declares less",
    "interface: two exchanged": _ALIKE,
    "interface: type": "A denotation, which nothing reads",
    "metadata: a property removed, added, twice": "The order; a property without a reader",
    "metadata: a value": "Evidence in the report, which is text for people",
    "metadata: a value added": "A warning, or a key that nothing reads",
    "metadata: a value removed": "A warning, or a key that nothing reads",
    "metadata: a value of another type": "Evidence in the report, which is text for people; a key that nothing reads",
    "metadata: a key": "A key that nothing reads",
    "metadata: another writing of the JSON": "The same content in another order, with other spaces",
    "metadata: text": "The version that scaled the file, which is shown; spaces around JSON",
    "metadata: the record of the original": "The same original packed in another way, or with other names inside, "
    "documentation or order: what comes out computes the same",
    "metadata: two values exchanged": "Evidence in the report, or equal values",
    "model: IR version": "A newer version of the file format, in which all of it is written in the same way",
    "model: opset": "The order; the same opset twice; an opset of an unused domain",
    "model: producer, domain, version, doc string": _PROSE,
    "model: training_info, configuration": "A configuration of devices, which no node refers to",
    "node: doc string": _PROSE,
    "node: domain": "`ai.onnx` is the name of the default domain",
    "node: duplicated": _UNREAD,
    "node: input added": "An empty operand at the end, within the operator's number",
    "node: input removed": "An empty operand at the end",
    "node: inputs exchanged": "Equal operands",
    "node: metadata": "The mark of a pass in a body, or beside another; any other is text without a reader",
    "node: moved": "Another topological order",
    "node: name": "Names of nodes are free, where each is there once",
    "node: output added": "An empty result at the end, within the operator's number",
    "node: output removed": "An optional result that nothing reads",
    "node: output renamed": _INNER,
    "nodes: order reversed or shuffled": "Another topological order",
    "nodes: outputs of two exchanged": _ALIKE,
    "two or three edits": "Each is one of those above",
}


def write_table(path: Path, seed: int, records: Sequence[dict[str, Any]]) -> list[str]:
    """Write the table; return the kinds that were accepted and have no reason."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        counts.setdefault(record["kind"], Counter())[record["verdict"]] += 1
    total = sum(counts.values(), Counter[str]())
    accepted = sorted(kind for kind, count in counts.items() if count["equal"])
    first, last = (choose(record["index"] for record in records) for choose in (min, max))
    run = [record for record in records if record.get("ran")]
    lines = [
        "# Random edits",
        "",
        "Written by `python benchmarks/random_edits.py --log FILE.jsonl --output benchmarks/RANDOM_EDITS.md`.",
        "",
        f"{len(records)} edits (seed {seed}, indices from {first} to {last}) of "
        f"{len({record['graph'].partition(' (')[0] for record in records})} graphs, as scaled by "
        f"{len({record['graph'].partition(' (')[2] for record in records})} settings. {total['rejected']} were "
        f"rejected by `verify` with `runs=0`; {total['equal']} accepted, and nothing changed; {total['unloadable']} "
        f"accepted, and ONNX Runtime does not load them; {total['survivor']} accepted, and something changed; "
        f"{total['crash']} crashed it, or took more than 20 s.",
        "",
        f"Of those accepted, {len(run)} ran on ONNX Runtime ({', '.join(sorted({r['runtime'] for r in run}))}) beside "
        "the unedited graph, without optimizations, on 13 feeds and three steps of their own state, on one thread: all "
        "outputs, and the state in place, have the same bits. On all, `gs.Session` took three steps with the same "
        "results, `gs.strip` gave an original that computes the same, and `gs.lint`, `gs.split` and `gs.inspect` said "
        "the same.",
        "",
        "| edit | edits | rejected | accepted, equal | not loaded | survived | crashed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, count in sorted(counts.items()):
        cells = " | ".join(str(count[verdict]) for verdict in _VERDICTS)
        lines.append(f"| {kind} | {count.total()} | {cells} |")
    lines += ["", "## Not as it should be", ""]
    faults = [record for record in records if record["verdict"] not in ("rejected", "equal")]
    lines += [f"- {r['verdict']}: index {r['index']}, {r['graph']}: {_what(r)}" for r in faults] or ["Nothing."]
    lines += ["", "## Why accepted edits are harmless", ""]
    lines += [f"- {kind} ({counts[kind]['equal']}): {REASONS.get(kind, '**no reason known**')}." for kind in accepted]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return [kind for kind in accepted if kind not in REASONS]


def _what(record: dict[str, Any]) -> str:
    places = "; ".join(f"{kind} at {place}" for kind, place in zip(record["kinds"], record["places"], strict=True))
    return " ".join(f"{places[:300]}: {record.get('why', '')[:200]}".replace("|", "/").split())
