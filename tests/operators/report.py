"""Write docs/project/conformance.md: rules, traits and survivals tried, on how many nodes, and the ones too strict.

    python -m tests.operators.report [--lists]

Its lists follow from the table of operators and from the recipes. The numbers are measured anew, in a few minutes,
unless the lists alone are asked for.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnxruntime

from tests.operators.cases import NEWEST, OLDEST, Case, is_training_operator, schema_versions
from tests.operators.claims import ruled_operators, traits_of
from tests.operators.coverage import UNTRIED, claims_something, may_be_scaled
from tests.operators.drawn import each_draw
from tests.operators.properties import try_traits
from tests.operators.recipes import RECIPES, draw_case
from tests.operators.runtimes import RefusedError
from tests.operators.scaling import Trial, try_case
from tests.operators.suite import suite_cases
from tests.operators.survival import SPECIAL, find_weak, try_survival
from tests.operators.survival import Trial as SurvivalTrial
from tests.operators.values import is_float_data

PAGE = Path(__file__).resolve().parents[2] / "docs" / "project" / "conformance.md"
_BEGIN, _END = "<!-- numbers -->\n", "<!-- end of numbers -->\n"

_INTRODUCTION = """# Conformance

The degree rules, traits and survivals of operators are a table written by hand. The tests compare the table with the
results of ONNX Runtime, or of the reference evaluator of ONNX where ONNX Runtime lacks an opset or a type.

- **Degrees.** Operands are multiplied by powers of two, each alone and together with others, and set to zero where
  the analysis knows zeros. Each output must be multiplied by the power that the rule claims, bit by bit. A rule that
  is stricter than necessary is no mistake; the list below names those rules.
- **Traits.** Operators that cannot fail are fed with extremes; two seeds show what is random; fed memory shows writes;
  elements are compared where a trait states that a result holds those of an operand.
- **Survival.** Infinity, minus infinity and NaN are put at single places of each operand, and ordinary numbers at the
  same places. The survival of the operand names the effects that such a number may have: infinity of either sign, NaN,
  no effect because it is left out, or a finite number that depends on it, as from a bound. Another effect is a mistake.

The nodes are those of ONNX's own operator suite, and nodes drawn for each definition that an operator has in the
opsets that graphscale admits: optional operands present and absent, all values of attributes that are words, ranks 0
to 4, empty axes. `tests/operators/recipes/` says how to draw them; `python -m tests.operators.report` writes this
page.
"""


def _name(operator: tuple[str, str]) -> str:
    return "::".join(filter(None, operator))


def _listed(operators: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"`{_name(operator)}`" for operator in sorted(operators))


def _lists() -> list[str]:
    """Return the part of the page that follows from the table and the recipes."""
    drawn = ruled_operators() & RECIPES.keys()
    silent = ruled_operators() - RECIPES.keys() - UNTRIED.keys()
    assert not any(map(claims_something, silent))
    reasons = defaultdict(list)
    for operator, reason in UNTRIED.items():
        reasons[reason].append(operator)
    lines = ["## Drawn", "", "| opsets of ai.onnx | definitions | operators |", "|---|---|---|"]
    groups = defaultdict(list)
    for operator in drawn:
        starts = tuple(span.start for span in schema_versions(operator))
        groups["training" if is_training_operator(operator) else f"{starts[0]} to {NEWEST}"].append(operator)
    for group, operators in sorted(groups.items()):
        count = sum(len(schema_versions(operator)) for operator in operators)
        title = "ONNX Runtime's own" if group == "training" else group
        lines.append(f"| {title} | {count} | {_listed(operators)} |")
    lines += ["", "## Not tried", "", "Rules and traits that no runtime at hand can show:", ""]
    lines += [f"- {_listed(operators)}: {reason}." for reason, operators in sorted(reasons.items())]
    lines += ["", "Operators that may not have a scaled operand at all, so that there is nothing to try:", ""]
    lines += [_listed(silent) + ".", ""]
    return lines


def fill_page(numbers: str) -> str:
    """Return the page with these numbers."""
    return "\n".join([_INTRODUCTION, f"{_BEGIN}{numbers}{_END}", *_lists()]).rstrip() + "\n"


def read_numbers(page: str) -> str:
    """Return the numbers of a page."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


@dataclasses.dataclass
class _Tally:
    """Counts over cases: of nodes that ran and that no runtime ran, of claims, and of trials of traits and survivals.

    Attributes:
        conflicts: the assignments that the table forbids.
        wrong: the claims, traits and survivals that did not hold.
        operators: the operators that ran.
        by_opset: for each opset, the operators and the numbers of nodes and claims.
    """

    nodes: int = 0
    refused: int = 0
    claims: int = 0
    conflicts: int = 0
    traits: int = 0
    survivals: int = 0
    wrong: int = 0
    operators: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    by_opset: dict[int, tuple[set[tuple[str, str]], Counter[str]]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: (set(), Counter()))
    )

    def add(self, trial: Trial) -> None:
        """Count one case."""
        self.nodes += 1
        self.operators.add(trial.case.operator)
        self.claims += trial.claims.total()
        self.conflicts += trial.conflicts.total()
        self.wrong += len(trial.wrong)
        for opset in trial.claims.keys() | trial.conflicts.keys():
            operators, counts = self.by_opset[opset]
            operators.add(trial.case.operator)
            counts["nodes"] += 1
            counts["claims"] += trial.claims[opset]


def _drawn_cases(training: bool) -> list[Case]:
    operators = [operator for operator in sorted(RECIPES) if is_training_operator(operator) is training]
    return [draw_case(operator, *draw) for operator in operators for draw in each_draw(operator)]


def _measure() -> str:
    """Run everything; return the numbers as a part of the page."""
    suite = [case for case in suite_cases() if any(map(is_float_data, case.feeds.values()))]
    sources = {
        "ONNX's operator suite": suite,
        "drawn, ai.onnx": _drawn_cases(False),
        "drawn, ONNX Runtime's own": _drawn_cases(True),
    }
    tallies = {source: _Tally() for source in sources}
    strict: dict[tuple[tuple[str, str], tuple[int, ...]], list[set[int]]] = defaultdict(list)
    survived: dict[tuple[str, str], list[SurvivalTrial]] = defaultdict(list)
    for source, cases in sources.items():
        for case in cases:
            try:
                trial, findings = try_case(case, strictness=True), try_traits(case)
            except RefusedError:
                tallies[source].refused += 1
                continue
            tallies[source].add(trial)
            tallies[source].traits += findings.tried.total()
            survival = try_survival(case)
            survived[case.operator].append(survival)
            tallies[source].survivals += survival.tried
            tallies[source].wrong += len(findings.wrong) + len(survival.wrong)
            inputs = list(case.node.input)
            # The results of an operator that writes into its operands say nothing of what it writes.
            for names, degrees in trial.forbidden.items() if "WRITES_INPUT" not in traits_of(case.operator) else ():
                if all(name in inputs for name in names) and len(degrees) < 2:
                    strict[case.operator, tuple(map(inputs.index, names))].append(degrees)
    return "\n".join([*_totals(tallies), *_opsets(tallies), *_strict_rules(strict), *_weak_survivals(survived)])


def _totals(tallies: dict[str, _Tally]) -> list[str]:
    versions = f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}"
    lines = ["", f"## Numbers ({versions})", ""]
    lines += [
        "| nodes | operators | ran | refused | degrees tried | forbidden | traits tried | survivals tried | wrong |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for source, tally in tallies.items():
        counts = (len(tally.operators), tally.nodes, tally.refused, tally.claims, tally.conflicts, tally.traits)
        counts += (tally.survivals,)
        lines.append(f"| {source} | {' | '.join(f'{count:,}' for count in counts)} | {tally.wrong} |")
    return lines


def _opsets(tallies: dict[str, _Tally]) -> list[str]:
    lines = ["", "By opset, where a node counts in each opset in which its operator is defined alike:", ""]
    lines += ["| opset | operators | nodes | degrees tried |", "|---|---|---|---|"]
    for opset in range(OLDEST, NEWEST + 1):
        parts = [tally.by_opset[opset] for tally in tallies.values() if opset in tally.by_opset]
        operators = set[tuple[str, str]]().union(*(part[0] for part in parts))
        counts = sum((part[1] for part in parts), Counter[str]())
        lines.append(f"| {opset} | {len(operators)} | {counts['nodes']:,} | {counts['claims']:,} |")
    return lines


def _strict_rules(strict: dict[tuple[tuple[str, str], tuple[int, ...]], list[set[int]]]) -> list[str]:
    """Name the operands that may not be scaled although all nodes tried have results of one degree."""
    lines = ["", "Stricter than need be: these operands may not have degree 1, and yet all results had"]
    texts = {1: "degree 1", 0: "degree 0 (most of them on purpose: a decision that a NaN would change)"}
    for degree, text in texts.items():
        found = defaultdict(list)
        for (operator, operands), outcomes in sorted(strict.items()):
            if len(outcomes) > 1 and all(outcome == {degree} for outcome in outcomes):
                found[operator].append(" and ".join(map(str, operands)))
        operators = "; ".join(f"`{_name(key)}` {', '.join(found[key])}" for key in sorted(found))
        lines += ["", f"- {text}: {operators}."]
    return [*lines, ""]


def _weak_survivals(trials: dict[tuple[str, str], list[SurvivalTrial]]) -> list[str]:
    """Name the operands whose numbers may be bent by the table, and are not, among those that may be scaled."""
    texts = []
    for operator, of_operator in sorted(trials.items()):
        weak = {i: kinds for i, kinds in find_weak(of_operator).items() if may_be_scaled(operator, i)}
        names = (
            f"{i} ({', '.join(str(number) for kind, number in SPECIAL.items() if kind in kinds)})"
            for i, kinds in sorted(weak.items())
        )
        texts += [f"`{_name(operator)}` {', '.join(names)}"] if weak else []
    lines = [
        "Weaker than need be: these numbers may be bent by the table, since other kernels may do so, and none was:"
    ]
    return [*lines, "", "; ".join(texts) + ".", ""]


if __name__ == "__main__":
    PAGE.write_text(fill_page(read_numbers(PAGE.read_text()) if "--lists" in sys.argv else _measure()))
