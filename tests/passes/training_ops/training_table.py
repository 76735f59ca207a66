"""Write docs/reference/training-operators.md: standard forms of training operators, and their errors.

    python -m tests.passes.training_ops.training_table record FILE.npz     with onnxruntime-training
    python -m tests.passes.training_ops.training_table measure FILE.npz    with stock ONNX Runtime
    python -m tests.passes.training_ops.training_table

The first command runs the kernels on random cases, the second the standard forms of the same cases. The third one only
writes the page, with the last measured errors.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from graphscale.passes import lower_training_ops
from graphscale.passes.lower_training_ops import FORMULAS
from graphscale.passes.lower_training_ops.without_form import WITHOUT_FORM
from tests.passes.training_ops.cases import REFERENCES, Case, check_case, run_reference
from tests.passes.training_ops.drawing import RECIPES, draw_case, load_families
from tests.passes.training_ops.emitted_operators import OPERATORS, read_emitted
from tests.passes.training_ops.recorded_cases import Recorded, read_cases, write_cases

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "training-operators.md"
ERRORS = OPERATORS.with_name("errors.json")
# The cases of each operator: those of the full tier of `test_kernels.py`.
_COUNT = 40
# Clauses of docstrings about where a formula comes from.
_SOURCES = (
    ", as the schema says",
    ", as the kernel does",
    ", as the schema's function does",
    ", from the kernel",
    ", from the schema",
    "; source: the kernel",
    "; source: the definition of Conv in ONNX",
    "; source: the definition of ConvTranspose in ONNX",
    ": its kernel, and Slice, whose operands it has",
    ": see `_loss`",
    ": see `_slope`",
    ", see `_slope`,",
    "; see `_row_slopes`",
)
# They refuse what any formula may need.
_WRITERS = ("lower_training_ops", "node_writer", "writer")
# A module, and a function or a class.
_Place = tuple[str, str]
_FAMILIES = Path(lower_training_ops.__file__).parent

_INTRODUCTION = """# Lowering of training operators

Stock ONNX Runtime has none of the training operators of onnxruntime-training, which ended with 1.19.2. The targets
`onnx`, `ort-cpu` and `ort-cuda` replace them by standard ones, and so do `graphscale lower-training MODEL -o OUT` and
[`gs.lower_training_ops`](api.md). This page has the standard form of each operator, and the refused ones.

## Operators

*Emitted for* names the forward operators that `GradientGraphBuilder` and `generate_artifacts` of 1.19.2 emit an
operator for, read off the gradient graphs of all forward operators that they can differentiate, with variations of
attributes. `generate_artifacts` behind a name means that it alone rewrites the forward graph in this way. Operators
without an entry come from older exporters and ORTModule.

*Error* is the largest one over {count} random cases in float32: shapes, attributes and optional operands vary. The
kernels run on onnxruntime-training 1.19.2, the standard forms on stock ONNX Runtime {version}, both on a CPU. It is
relative to the largest magnitude in the kernel's result; *exact* means that all results are integers, or equal in all
bits. A dagger (†) marks operators whose CPU kernel in 1.19.2 is missing or wrong: other kernels or NumPy replace it.
"""

_FACTS = """## States

A state that an operator writes in place, an accumulated gradient, a running mean, the weights of an optimizer, has
its next value among the outputs, `NAME.next`, to be fed back. `graphscale.roles` in the metadata says so. An
initializer that is written becomes an input that keeps its first value. A skipped step keeps such a state. Gradients
are set to zero all the same where the host sets the flag of the accumulator, as in the kernel.

## Whole trainings

200 steps with kernels against 200 steps in standard forms. The kernels run graphs of
[`models/ort`](../project/models.md) scaled for `ort-training`, with a host that applies sums of two batches, and its
folders, scaled, with `Module` and `Optimizer` of a training session. The standard forms are the graphs scaled for
`onnx`, and the folders fused and scaled for `ort-cpu`. Scales and skips are the same in every step. All of them load
and train on stock 1.32.0 and on 1.20.0 as well, without one training operator. The last columns are the largest
errors of the losses, and of weights and gradients relative to the largest number of each. Values whose gradient is 0
except for rounding are left out: biases in front of a normalization and in keys of attention, and the running means
of such a bias.

| training | skipped | scale at the end | losses | weights, gradients |
|---|---|---|---|---|
| `activations` | 4 | 2048 | 1e-07 | 1e-07 |
| `bce` | 4 | 2048 | 1e-07 | 0 |
| `conv` | 4 | 2048 | 1e-06 | 6e-06 |
| `digits_mlp` | 4 | 2048 | 8e-07 | 4e-06 |
| `gradbuilder_mlp` | 4 | 2048 | 2e-07 | 2e-07 |
| `gradbuilder_regression` | 4 | 2048 | 0 | 0 |
| `indexing` | 4 | 2048 | 0 | 0 |
| `opset12` | 4 | 2048 | 1e-07 | 3e-07 |
| `recurrent` | 4 | 2048 | 3e-07 | 1e-06 |
| `transformer` | 4 | 2048 | 1e-07 | 2e-06 |
| `conv_adamw` | 4 | 2048 | 1e-06 | 2e-06 |
| `digits_adamw` | 4 | 2048 | 1e-06 | 1e-06 |
| `digits_adamw_clip` | 4 | 2048 | 9e-07 | 2e-06 |
| `digits_sgd` | 4 | 2048 | 2e-07 | 2e-07 |
| `transformer_adamw` | 0 | 65536 | 1e-06 | 6e-06 |

`python -m tests.ort.long_runs.record` records the kernels, and `tests/ort/long_runs` compares the standard forms with
them.

## Kernels that differ from their operators

Seen by running 1.19.2. Unless said otherwise, the standard form computes what ONNX says.

- `ConvGrad` assumes no padding where `auto_pad` is SAME_UPPER or SAME_LOWER.
- `AveragePoolGrad` ignores `dilations` and `auto_pad`, and is wrong for overlapping windows with three spatial axes.
- `MaxPoolGrad` misreads the indices of `storage_order` 1, a form that is refused.
- `SoftmaxCrossEntropy` with reduction `none` gives a sum with the wrong sign, a form that is refused.
- `GeluGrad` is emitted for `Gelu` with `approximate="tanh"` too. It is the derivative of the exact form, which
  differs by at most 0.0009. The standard form does the same.
- `DropoutGrad` does not read `training_mode`. Nor does the standard form.

## Graphs that 1.19.2 does not differentiate

- `BatchNormalization`, `LSTM` and `GRU`, by `GradientGraphBuilder` alone: `generate_artifacts` rewrites them first.
- `Dropout`, `LayerNormalization` and `SimplifiedLayerNormalization` whose second result is left out.
- `Add`, `Sub` and `Mul` of two operands with a symbol and a number for the same axis.
- `ReduceL2` and `ReduceLogSumExp` with `keepdims` 0 from opset 13 to 17: it writes an `Unsqueeze` of opset 11 for
  them.
- `ATen`, and custom operators: Python code registers their gradients. They stay unchanged.
"""


def phrase(operator: tuple[str, str]) -> str:
    """Return the formula of an operator as its docstring has it, without the verb and the source."""
    text = (FORMULAS[operator].__doc__ or "").split("\n")[0].removesuffix(".")
    for source in _SOURCES:
        text = text.replace(source, "")
    return text.removeprefix("Compute ").replace("|", "\\|")


def refusals() -> dict[str, set[str]]:
    """Return the operators that each reason to refuse a form is for, all if it is one of the writer's own.

    A formula refuses what the functions refuse that it calls, found in their source.
    """
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(_FAMILIES.glob("*.py"))}
    functions: dict[_Place, ast.AST] = {}
    imported: dict[str, dict[str, _Place]] = defaultdict(dict)
    for module, tree in trees.items():
        for node in tree.body if module not in _WRITERS else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                functions[module, node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                source = node.module.rsplit(".", 1)[-1]
                imported[module] |= {alias.name: (source, alias.name) for alias in node.names}
    found: dict[str, set[str]] = defaultdict(set)
    for (domain, op_type), formula in FORMULAS.items():
        for place in _reach((formula.__module__.rsplit(".", 1)[-1], formula.__name__), functions, imported):
            for reason in _reasons(functions[place]):
                found[reason].add(_name((domain, op_type)))
    for module in _WRITERS:
        found |= {reason: set() for reason in _reasons(trees[module])}
    unreached = {reason for tree in trees.values() for reason in _reasons(tree)} - found.keys()
    assert not unreached, f"no formula seems to refuse: {unreached}"
    return found


def _reach(
    start: _Place, functions: Mapping[_Place, ast.AST], imported: Mapping[str, Mapping[str, _Place]]
) -> set[_Place]:
    """Return a function and those that it names, directly or not."""
    seen: set[_Place] = set()
    waiting = [start]
    while waiting:
        place = waiting.pop()
        if place in seen or place not in functions:
            continue
        seen.add(place)
        module = place[0]
        names = {node.id for node in ast.walk(functions[place]) if isinstance(node, ast.Name)}
        waiting += [imported[module].get(name, (module, name)) for name in names]
    assert start in seen, start
    return seen


def _reasons(tree: ast.AST) -> list[str]:
    """Return the reasons in the calls of `refusal`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [_template(call.args[0]) for call in calls if getattr(call.func, "attr", "") == "refusal"]


def _template(text: ast.expr) -> str:
    """Return the text of a message, with an ellipsis for each value."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def fill_page() -> str:
    """Return the page."""
    load_families()
    errors = json.loads(ERRORS.read_text())
    text = _INTRODUCTION.replace("{count}", str(_COUNT)).replace("{version}", errors["version"])
    rows = "\n".join(_row(operator, errors["errors"][_name(operator)]) for operator in sorted(FORMULAS, key=_order))
    reasons = defaultdict(list)
    for operator, reason in sorted(WITHOUT_FORM.items()):
        reasons[reason].append(operator)
    lines = [
        text,
        "| operator | emitted for | formula | error |",
        "|---|---|---|---|",
        rows,
        "",
        "## Without a form",
        "",
    ]
    lines += [f"- {', '.join(f'`{_name(each)}`' for each in group)}: {reason}." for reason, group in reasons.items()]
    lines += [
        "",
        "## Refused forms",
        "",
        "Each is refused in one line that names the node, and nothing is written.",
        "",
    ]
    lines += ["| operators | reason |", "|---|---|"]
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for reason, operators in refusals().items():
        groups[frozenset(operators)].append(reason)
    for operators, texts in sorted(groups.items(), key=lambda group: (not group[0], sorted(group[0]))):
        names = ", ".join(f"`{name}`" for name in sorted(operators)) or "any"
        lines += [f"| {names} | {'<br>'.join(sorted(texts))} |"]
    return "\n".join([*lines, "", _FACTS])


def _order(operator: tuple[str, str]) -> tuple[str, str]:
    return operator[1].lower(), operator[0]


def _name(operator: tuple[str, str]) -> str:
    return operator[1] if operator[0] else f"ai.onnx::{operator[1]}"


def _row(operator: tuple[str, str], error: float) -> str:
    sources = ", ".join(source.replace("_", "\\_") for source in read_emitted().sources.get(operator[1], []))
    mark = "†" if operator in REFERENCES else ""
    return f"| `{_name(operator)}` | {sources} | {phrase(operator)} | {f'{error:.0e}' if error else 'exact'}{mark} |"


def _record() -> Iterator[Recorded]:
    for operator in sorted(RECIPES):
        for number in range(_COUNT):
            case = draw_case(operator, random.Random(f"{operator[1]}-{number}"))
            if not _is_wide(case):
                yield case, run_reference(case)


def _is_wide(case: Case) -> bool:
    values = [item for value in case.inputs for item in (value if isinstance(value, list) else [value])]
    return any(value is not None and value.dtype == np.float64 for value in values)


def _measure(path: Path) -> None:
    import onnxruntime

    errors: dict[str, float] = defaultdict(float)
    for case, results in read_cases(path):
        name = _name((case.domain, case.op_type))
        errors[name] = max(errors[name], check_case(case, results))
    version = onnxruntime.__version__
    rounded = {name: float(f"{error:.1e}") for name, error in sorted(errors.items())}
    ERRORS.write_text(json.dumps({"version": version, "errors": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    load_families()
    if sys.argv[1:2] == ["record"]:
        write_cases(Path(sys.argv[2]), _record())
        sys.exit()
    if sys.argv[1:2] == ["measure"]:
        _measure(Path(sys.argv[2]))
    PAGE.write_text(fill_page(), encoding="utf-8")
