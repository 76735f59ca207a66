"""The value that each value equals if a flag is false, or true: bit for bit, and as numbers."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from graphscale.flow.outcome import Number, Outcome, Outcomes
from graphscale.graph.types import holds_all
from graphscale.graph.values import values_by_name
from tests.build import parse
from tests.conftest import assert_same_bits

INPUTS = """bool flag, bool other, float[4] w, float[4] new, float16[4] half, int64[4] count, int64[4] more,
    float[3,4] xs, int64 rounds"""
CONSTANTS = """float zero = {0}, float minus = {-0.0}, float one = {1}, int64[4] none = {0, 0, 0, 0}, bool yes = {1},
    int64[2] square = {2, 2}, int64[1] row = {4}, int64[2] rows = {3, 4}, float[4,1] column = {0, 0, 0, 0},
    float[4] both = {0.0, -0.0, 0.0, -0.0}"""
FUNCTIONS = """<domain: "own", opset_import: ["" : 20]> keep (c, a, b) => (r) { d = Identity(a) r = Where(c, d, b) }
    <domain: "own", opset_import: ["" : 20]> double (a) => (r) { b = Add(a, a) r = Identity(b) }"""

WIDE = "a = Cast<to = {0}>({1}) b = Cast<to = {0}>({2}) c = Where(flag, a, b) r = Cast<to = {3}>(c)"
FLOAT, UINT8, INT64, BOOL, FLOAT16, DOUBLE = 1, 2, 7, 9, 10, 11

KEEP = """If(flag) <then_branch = t () => (float[4] p) { p = Neg(new) },
    else_branch = e () => (float[4] q) { q = Identity(w) }>"""
KEEP_IN_IF = f"""If(other) <then_branch = u () => (float[4] s) {{ s = {KEEP} }},
    else_branch = v () => (float[4] t) {{ t = Identity(w) }}>"""
OTHER_IF = """If(other) <then_branch = t () => (float[4] p) { p = Where(flag, new, w) },
    else_branch = e () => (float[4] q) { q = Identity(new) }>"""
NUMBER_IF = """If(flag) <then_branch = t () => (float p) { p = Constant<value_float = 1.0>() },
    else_branch = e () => (float q) { q = Constant<value_float = 0.0>() }>"""
LOOP = """Loop(rounds, yes, w) <body = l (int64 i, bool on, float[4] p) => (bool on2, float[4] p2)
    { on2 = Identity(on) %s }>"""
IN_LOOP = (
    LOOP
    % """p2 = If(other) <then_branch = u () => (float[4] s) { s = Loop(rounds, yes, p)
    <body = k (int64 j, bool go, float[4] q) => (bool go2, float[4] q2)
    { go2 = Identity(go) q2 = Where(flag, new, q) }> }, else_branch = v () => (float[4] t) { t = Identity(p) }>"""
)
PAIR_LOOP = """Loop(rounds, yes, w, w) <body = l (int64 i, bool on, float[4] p, float[4] q)
    => (bool on2, float[4] p2, float[4] q2) { on2 = Identity(on) p2 = Identity(q) q2 = Neg(q) }>"""
COLLECT = """Loop(rounds, yes) <body = l (int64 i, bool on) => (bool on2, float{} p)
    {{ on2 = Identity(on) p = {} }}>"""
SCAN = """Scan(w, xs) <num_scan_inputs = 1, body = l (float[4] p, float[4] x) => (float[4] p2, float[4] y)
    {{ p2 = {} y = {} }}>"""
PART_SCAN = """Scan(xs, xs) <num_scan_inputs = 1, body = l (float[3,4] p, float[4] x) => (float[3,4] p2)
    { p2 = Where(other, x, p) }>"""

# The nodes, the type of `r`, its outcome without the flag and with it: a flag, a number, a value; "r" for itself alone.
CASES = {
    "a select": ("r = Where(flag, new, w)", "float[4]", "w", "new"),
    "a select, negated": ("n = Not(flag) r = Where(n, w, new)", "float[4]", "w", "new"),
    "a select by two flags": ("b = And(other, flag) r = Where(b, new, w)", "float[4]", "w", "r"),
    "a select by one of two flags": ("b = Or(flag, other) r = Where(b, new, w)", "float[4]", "r", "new"),
    "a flag and a constant": ("b = And(flag, yes)  r = Where(b, new, w)", "float[4]", "w", "new"),
    "two unknown flags": ("r = And(other, other)", "bool", "r", "r"),
    "an order": ("n = Not(other) b = And(other, n) c = Where(b, new, w) r = Identity(c)", "float[4]", "w", "w"),
    "a select between equal values": ("v = Identity(w) r = Where(other, v, w)", "float[4]", "w", "w"),
    "a select by a constant": ("r = Where(yes, w, new)", "float[4]", "w", "w"),
    "a select by another flag": ("r = Where(other, new, w)", "float[4]", "r", "r"),
    "views": ("a = Reshape(w, square) b = Reshape(a, row) r = Where(flag, new, b)", "float[4]", "w", "new"),
    "elements in another order": (
        "a = Reshape(w, square) b = Transpose(a) c = Reshape(b, row) r = Where(flag, new, c)",
        "float[4]",
        "c",
        "new",
    ),
    "a repeated value": ("r = Expand(w, rows)", "float[3,4]", "r", "r"),
    "a repeated number": ("f = Cast<to = 1>(flag) r = Expand(f, rows)", "float[3,4]", "0.0", "1.0"),
    "a flag as a number and back": ("f = Cast<to = 1>(flag) r = Cast<to = 9>(f)", "bool", "False", "True"),
    "minus zero as an integer": ("s = Where(flag, one, minus) r = Cast<to = 7>(s)", "int64", "r", "r"),
    "less zero": ("s = Where(flag, new, zero) r = Sub(w, s)", "float[4]", "w", "r"),
    "less minus zero": ("s = Where(flag, new, minus) r = Sub(w, s)", "float[4]", "r", "r"),
    "zero less a value": ("s = Where(flag, new, zero) r = Sub(s, w)", "float[4]", "r", "r"),
    "plus zero": ("s = Where(flag, new, zero) r = Add(w, s)", "float[4]", "r", "r"),
    "plus minus zero": ("s = Where(flag, new, minus) r = Sum(s, w, minus)", "float[4]", "w", "r"),
    "plus zeros of both signs": ("r = Add(w, both)", "float[4]", "r", "r"),
    "a sum of zeros": ("s = Where(flag, zero, minus) r = Sum(s, minus)", "float", "-0.0", "0.0"),
    "plus an integer zero": ("s = Where(flag, more, none) r = Add(count, s)", "int64[4]", "count", "r"),
    "a product with zero": ("f = Cast<to = 1>(flag) r = Mul(f, new)", "float[4]", "r", "new"),
    "a product with one": ("n = Not(flag) f = Cast<to = 1>(n) r = Mul(w, f)", "float[4]", "w", "r"),
    "a select by arithmetic": (
        "f = Cast<to = 1>(flag) n = Not(flag) g = Cast<to = 1>(n) a = Mul(f, new) b = Mul(g, w) r = Add(a, b)",
        "float[4]",
        "r",
        "r",
    ),
    "a select in float64": (WIDE.format(DOUBLE, "new", "w", FLOAT), "float[4]", "w", "new"),
    "a select of float16 in float32": (WIDE.format(FLOAT, "half", "half", FLOAT16), "float16[4]", "half", "half"),
    "a select in float16": (WIDE.format(FLOAT16, "new", "w", FLOAT), "float[4]", "b", "a"),
    "a select of int64 in float64": (WIDE.format(DOUBLE, "more", "count", INT64), "int64[4]", "r", "r"),
    "a select of flags in uint8": (WIDE.format(UINT8, "flag", "other", BOOL), "bool", "other", "True"),
    "If": (f"r = {KEEP}", "float[4]", "w", "p"),
    "If in If": (f"r = {KEEP_IN_IF}", "float[4]", "w", "r"),
    "If by another flag": (f"r = {OTHER_IF}", "float[4]", "r", "new"),
    "If with constants": (f"a = {NUMBER_IF} r = Sub(w, a)", "float[4]", "w", "r"),
    "Loop": ("r = " + LOOP % "p2 = Where(flag, new, p)", "float[4]", "w", "r"),
    "Loop, changed by a copy": ("r = " + LOOP % "a = Where(flag, p, new) p2 = Identity(a)", "float[4]", "r", "w"),
    "Loop, changed in the second round": (f"r, s = {PAIR_LOOP}", "float[4]", "r", "r"),
    "Loop in If in Loop": (f"r = {IN_LOOP}", "float[4]", "w", "r"),
    "Loop, copies of each round": ("r = " + COLLECT.format("[4]", "Identity(w)"), "float[N,4]", "r", "r"),
    "Loop, numbers of each round": ("r = " + COLLECT.format("", "Cast<to = 1>(flag)"), "float[N]", "0.0", "1.0"),
    "Scan": ("r, s = " + SCAN.format("Where(flag, x, p)", "Identity(p)"), "float[4]", "w", "r"),
    "Scan, parts": ("s, r = " + SCAN.format("Identity(p)", "Identity(x)"), "float[3,4]", "r", "r"),
    "Scan, a part and the whole": (f"r = {PART_SCAN}", "float[3,4]", "r", "r"),
    "a function": ("r = own.keep(flag, new, w)", "float[4]", "w", "new"),
    "two calls of a function": ("a = own.double(new) b = own.double(w) r = Where(other, a, b)", "float[4]", "r", "r"),
}


class Sum(OpRun):
    """A sum of zeros keeps its sign; Python's own begins with 0."""

    op_domain = ""

    def _run(self, *terms: np.ndarray) -> tuple[np.ndarray]:
        return (functools.reduce(np.add, terms),)


def model(nodes: str, outputs: str) -> onnx.ModelProto:
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1, "com.microsoft" : 1]>
        step ({INPUTS}) => ({outputs}) <{CONSTANTS}> {{ {nodes} }} {FUNCTIONS}
    """)


def outcomes_in(text: onnx.ModelProto, flag: bool) -> tuple[Outcomes, dict[str, ir.Value]]:
    parsed = ir.from_proto(text)
    values = values_by_name(parsed.graph)
    return Outcomes(parsed.graph, {values["flag"]: flag}, parsed.graph.inputs, functions=parsed.functions), values


def label(outcome: Outcome) -> str:
    if isinstance(outcome, ir.Value):
        return outcome.name or ""
    return outcome.value if isinstance(outcome, Number) else str(outcome)


def feeds(flag: bool, other: bool) -> dict[str, np.ndarray]:
    """Numbers that change if something is added, multiplied or rounded."""
    tensors = {
        "w": np.asarray([-0.0, 1 / 3, np.inf, 1e-30], np.float32),
        "new": np.asarray([np.nan, -np.inf, 0.1, -0.0], np.float32),
        "half": np.asarray([-0.0, 0.1, 65504, 6e-8], np.float16),
        "count": np.asarray([0, -1, 2**53 + 1, 2**62 + 1]),
        "more": np.asarray([1, 2, 3, 2**62 + 3]),
        "xs": np.arange(12, dtype=np.float32).reshape(3, 4),
        "rounds": np.asarray(3),
    }
    return {"flag": np.asarray(flag), "other": np.asarray(other), **tensors}


def confirm(text: onnx.ModelProto, flag: bool, claims: dict[str, Outcome]) -> None:
    """Compare outcomes that are inputs or numbers with values that ONNX's reference computes.

    ONNX Runtime's kernel of Where turns -0.0 in its second operand into 0.0.
    """
    names = [value.name for value in text.graph.output]
    for other in (False, True):
        fed = feeds(flag, other)
        with np.errstate(all="ignore"):
            got = dict(zip(names, ReferenceEvaluator(text, new_ops=[Sum]).run(None, fed), strict=True))
        for name, outcome in claims.items():
            if isinstance(outcome, ir.Value) and outcome.name in fed:
                assert_same_bits(got[name], fed[outcome.name].astype(got[name].dtype), name)
            elif not isinstance(outcome, ir.Value):
                number = float(label(outcome)) if isinstance(outcome, Number) else outcome
                assert_same_bits(got[name], np.full_like(got[name], number), name)


@pytest.mark.static
@pytest.mark.parametrize("case", CASES)
def test_outcomes(case: str) -> None:
    nodes, output, *expected = CASES[case]
    text = model(nodes, f"{output} r")
    for flag, name in zip((False, True), expected, strict=True):
        outcomes, values = outcomes_in(text, flag)
        assert label(outcomes.of(values["r"])) == name
        confirm(text, flag, {"r": outcomes.of(values["r"])})


def drawn(seed: int) -> Iterator[tuple[str, str]]:
    """Draw nodes, each with the type of its result."""
    choose = random.Random(seed)
    known = {"bool": ["flag", "other", "yes"], "float[4]": ["w", "new"], "double[4]": [], "float16[4]": ["half"]}
    numbers = ["zero", "minus", "one"]
    for i in range(25):
        flag, left, right = choose.choice(known["bool"]), *choose.choices(known["float[4]"], k=2)
        number, half = choose.choice(numbers), choose.choice(known["float16[4]"])
        dtype, text = choose.choice([
            ("bool", f"Not({flag})"),
            ("bool", f"{choose.choice(['And', 'Or'])}({flag}, {choose.choice(known['bool'])})"),
            ("float", f"Cast<to = 1>({flag})"),
            ("float", f"Where({flag}, {number}, {choose.choice(numbers)})"),
            ("float", f"{choose.choice(['Add', 'Sub', 'Mul'])}({number}, {choose.choice(numbers)})"),
            ("float[4]", f"Where({flag}, {left}, {right})"),
            ("float[4]", f"Where({flag}, {left}, {number})"),
            ("float[4]", f"{choose.choice(['Add', 'Sub', 'Mul'])}({left}, {number})"),
            ("float[4]", f"{choose.choice(['Add', 'Sub', 'Mul'])}({number}, {left})"),
            ("float[4]", f"Sum({number}, {left}, {choose.choice(numbers)})"),
            ("float[4]", f"Identity({left})"),
            ("float16[4]", f"Cast<to = 10>({left})"),
            ("float[4]", f"Cast<to = 1>({half})"),
            ("double[4]", f"Cast<to = 11>({left})"),
            *[("float[4]", f"Cast<to = 1>({each})") for each in known["double[4]"][-1:]],
        ])  # fmt: skip
        (numbers if dtype == "float" else known[dtype]).append(f"v{i}")
        yield dtype, text


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sample(10)
def test_drawn_graphs(seed: int) -> None:
    """Each value has its outcome in a run."""
    nodes = list(drawn(seed))
    body = " ".join(f"v{i} = {text}" for i, (_, text) in enumerate(nodes))
    outputs = ", ".join(f"{dtype} v{i}" for i, (dtype, _) in enumerate(nodes))
    whole = model(body, outputs)
    for flag in (False, True):
        outcomes, values = outcomes_in(whole, flag)
        claims = {output.name: outcomes.of(values[output.name]) for output in whole.graph.output}
        confirm(whole, flag, claims)


# The nodes, and the outcome of `r` without the flag where numbers are compared.
LOOSE = {
    "plus zero": ("s = Where(flag, new, zero) r = Add(w, s)", "w"),
    "a negated zero": ("s = Where(flag, new, minus) n = Neg(s) r = Add(n, w)", "w"),
    "a quotient of zero": ("s = Where(flag, new, zero) d = Div(s, new) q = Sqrt(d) r = Sub(w, q)", "w"),
    "zero by zero less": ("s = Where(flag, new, zero) d = Div(new, s) r = Sub(w, d)", "r"),
    "a cast to float16": (WIDE.format(FLOAT16, "new", "w", FLOAT), "w"),
    "a product with zero": ("f = Cast<to = 1>(flag) p = Mul(f, xs) t = ReduceSum(p) r = Sub(w, t)", "w"),
    "a product with a value that may not be finite": ("f = Cast<to = 1>(flag) p = Mul(new, f) r = Sub(w, p)", "r"),
    "a contraction with zero": ("p = MatMul(new, column) r = Sub(w, p)", "r"),
    "a zero of another origin": ("p = Mul(new, zero) r = Sub(w, p)", "w"),
    "a flag that depends on the check": ("n = Not(flag) b = And(n, late) r = Where(b, w, new)", "w"),
    "a copy of a computed value": ("c = Neg(xs) r = Identity(c)", "c"),
}


@pytest.mark.static
@pytest.mark.parametrize("case", LOOSE)
def test_numbers(case: str) -> None:
    """Apart from rounding and the sign of zero, and with a list of the values that may be non-finite."""
    nodes, expected = LOOSE[case]
    graph = ir.from_proto(model(f"late = Or(flag, other) {nodes}", "float[4] r")).graph
    values = values_by_name(graph)
    dependent = {value for name, value in values.items() if name not in ("w", "new", "other", "zero", "p")}
    outcomes = Outcomes(graph, {values["flag"]: False}, risky={values["new"]}, dependent=dependent)
    assert label(outcomes.of(values["r"])) == expected
    products = [value.name for node in outcomes.products for value in node.outputs]
    assert products == (["p"] if "may not be finite" in case else [])


@pytest.mark.static
def test_a_flag_with_a_producer() -> None:
    """The known flag is the result of a node, of an If as well."""
    for node in ("c = Not(other)", "c = If(other) <then_branch = t () => (bool p) { p = Identity(flag) }, "
                 "else_branch = e () => (bool q) { q = Not(flag) }>"):  # fmt: skip
        graph = ir.from_proto(model(f"{node} r = Where(c, new, w)", "float[4] r")).graph
        values = values_by_name(graph)
        for flag, expected in ((False, "w"), (True, "new")):
            assert label(Outcomes(graph, {values["c"]: flag}).of(values["r"])) == expected


@pytest.mark.static
@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("t, r = com.microsoft.LambOptimizer(flag, one, zero, zero, count, w, new, new, new)", "w"),
        ("t, r = com.microsoft.LambOptimizer(other, one, zero, zero, count, w, new, new, new)", "r"),
        ("t, r = com.microsoft.LambOptimizer(, one, zero, zero, count, w, new, new, new)", "r"),
        ("t, m, v, r = com.microsoft.AdamOptimizer(one, count, w, new, w, w, half, zero, one, flag)", "r"),
        ("r = SequenceMap(w, new) <body = m (float p, float q) => (float p2) { p2 = Where(flag, p, q) }>", "r"),
        ("r = own.Where(flag, new, w)", "r"),
    ],
    ids=["stopped", "by another flag", "no signal", "ignored", "unknown bodies", "another domain"],
)
def test_operators_that_no_run_shows(node: str, expected: str) -> None:
    outcomes, values = outcomes_in(model(node, "float[4] r"), False)
    assert label(outcomes.of(values["r"])) == expected


def samples(dtype: ir.DataType) -> np.ndarray:
    """All numbers of a small type, the ends and the densest places of a large one."""
    kind = dtype.numpy()
    if dtype is ir.DataType.BOOL:
        return np.asarray([False, True])
    if kind.itemsize <= 2:
        return np.arange(2 ** (8 * kind.itemsize)).astype(f"u{kind.itemsize}").view(kind)
    if dtype.is_integer():
        ends = np.iinfo(kind)
        return np.asarray([ends.min, ends.min + 1, 0, 2**24 + 1, ends.max // 2, ends.max], kind)
    return np.asarray([1 / 3, -0.0, np.finfo(kind).max, np.finfo(kind).smallest_subnormal, np.inf, np.nan], kind)


@pytest.mark.static
def test_types_that_hold_the_numbers_of_others() -> None:
    """A cast there and back is the identity; a cast of negative integers to unsigned ones only by their wrapping."""
    names = "BOOL INT8 UINT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 FLOAT16 BFLOAT16 FLOAT DOUBLE"
    held = set()
    for narrow, wide in itertools.permutations((ir.DataType[name] for name in names.split()), 2):
        numbers = samples(narrow)
        with np.errstate(all="ignore"):
            there = numbers.astype(wide.numpy())
            back, before = (each.astype(np.float64) for each in (there.astype(narrow.numpy()), numbers))
            wraps = wide.is_integer() and np.any(before != there.astype(np.float64))
            same = np.array_equal(back, before, equal_nan=True)
            if narrow is ir.DataType.INT64 or narrow is ir.DataType.UINT64:
                same = np.array_equal(there.astype(narrow.numpy()), numbers)
        same = same and np.array_equal(np.signbit(back), np.signbit(before))
        assert holds_all(wide, narrow) == (same and not wraps and wide is not ir.DataType.BOOL), (narrow, wide)
        held |= {(narrow.name, wide.name)} if holds_all(wide, narrow) else set()
    assert {("INT32", "DOUBLE"), ("UINT8", "BFLOAT16"), ("BOOL", "UINT8"), ("UINT32", "INT64")} <= held
    assert not held & {("INT64", "DOUBLE"), ("FLOAT16", "BFLOAT16"), ("INT8", "UINT16"), ("FLOAT", "FLOAT16")}
    assert not holds_all(None, None) and not holds_all(ir.DataType.STRING, ir.DataType.FLOAT)
