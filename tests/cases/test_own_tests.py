"""Steps with a test of gradients of their own, such as optax's `apply_if_finite`, whose counts the guard keeps."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import feeds_for, parse
from tests.cases.steps import text_of
from tests.conftest import assert_same_bits, run_once

COUNTS = ("notfinite_count_next", "last_finite_next", "total_notfinite_next")
TEXT = text_of("apply_if_finite")
SELECTED = TEXT[TEXT.index("   w_next = Where") :]
BY_COND = """   w_next, count_next = If (applied) <
      then_branch = apply () => (float[4,3] w1, int64 n1) { w1 = Identity (w_new) n1 = Add (count, unit) },
      else_branch = reject () => (float[4,3] w2, int64 n2) { w2 = Identity (w) n2 = Identity (count) }
   >
}
"""
COMPARED = TEXT.replace("is_nan = IsNaN (gw)\n   is_inf = IsInf (gw)\n   is_bad = Or (is_nan, is_inf)", "SIZE")
FORMS = {
    "selected": TEXT,
    "by a condition": TEXT.replace(SELECTED, BY_COND),
    "compared with infinity": COMPARED.replace(
        "SIZE", "size = Abs (gw) is_good = Less (size, inf) is_bad = Not (is_good)"
    ).replace("float rate =", "float inf = {0x7f800000}, float rate ="),
    "compared with itself": COMPARED.replace("SIZE", "is_good = Equal (gw, gw) is_bad = Not (is_good)"),
    "a test of the loss": TEXT.replace("(gw)\n   is_", "(loss)\n   is_").replace("IsInf (gw)", "IsInf (loss)"),
}


def make(name: str) -> onnx.ModelProto:
    return parse(FORMS[name].replace("{0x7f800000}", "{inf}"))


def notes(model: onnx.ModelProto, **options: object) -> list[str]:
    found = gs.scale(model, accept=True, **options).report.warnings  # type: ignore[arg-type]
    return [warning for warning in found if "the step's own test of its gradients" in warning]


@pytest.mark.parametrize("name", FORMS)
def test_the_note_names_the_counts_alone(name: str) -> None:
    (note,) = notes(make(name))
    names = note.partition(": the step's own")[0]
    assert names == ", ".join(map(repr, COUNTS))
    assert all(f"--keep {count}" in note for count in COUNTS)
    assert any(each.startswith(names) for each in gs.inspect(make(name)).warnings)


def test_a_nan_is_counted_if_the_counts_are_kept() -> None:
    model = make("selected")
    feeds = feeds_for(model, notfinite_count=np.array(2), total_notfinite=np.array(7), last_finite=np.array(True))
    feeds["t"] = np.full_like(feeds["t"], np.nan)
    held = run_once(gs.scale(model, accept=True).model, feeds)[0]
    assert [held[name].item() for name in COUNTS] == [2, True, 7]
    assert not notes(model, keep=COUNTS)
    counted = run_once(gs.scale(model, accept=True, keep=COUNTS).model, feeds)[0]
    assert [counted[name].item() for name in COUNTS] == [3, False, 8]
    for outputs in (held, counted):
        assert_same_bits(outputs["w_next"], feeds["w"], "w")
        assert outputs["count_next"] == feeds["count"] and not outputs["all_finite"]


def test_a_note_for_a_part() -> None:
    (note,) = notes(make("selected"), keep=COUNTS[:2])
    assert note.startswith("'total_notfinite_next': ")


def test_the_skip_state_of_multi_steps() -> None:
    """optax's `skip_not_finite` stores what it saw, for a log: nothing of it depends on its previous value."""
    text = TEXT[: TEXT.index("   any_bad =")].replace("notfinite_count", "num_not_finite")
    text = text.replace("last_finite", "should_skip")
    text = text.replace("int64 total_notfinite)", "int64 other)").replace(", int64 total_notfinite_next", "")
    text = text.replace("to: int = 1", "to: int = 7").replace("int64 unit", "int64 none_bad = {0}, int64 unit")
    model = parse(f"""{text}
        num_not_finite_next = ReduceSum <keepdims: int = 0> (as_numbers)
        is_same = Equal (num_not_finite_next, none_bad)
        should_skip_next = Not (is_same)
        u = Mul (gw, rate)
        w_new = Sub (w, u)
        w_next = Where (should_skip_next, w, w_new)
        counted = Add (count, unit)
        count_next = Where (should_skip_next, count, counted)
    }}""")
    pairs = {f"{name}_next": name for name in ("num_not_finite", "should_skip")}
    (note,) = notes(model, updates=pairs)
    assert note.startswith("'num_not_finite_next', 'should_skip_next': ")


@pytest.mark.parametrize("text", ["", "is_large = Greater (gw, most)"], ids=["no test", "a test of the size"])
def test_no_note(text: str) -> None:
    """A clipping count depends on the size of gradients, which a skipped step does not have."""
    size = f"limit = Cast <to: int = 1> (most) {text.replace('most', 'limit')}"
    compared = size if text else "is_large = Not (last_finite)"
    model = parse(COMPARED.replace("SIZE", f"{compared} is_bad = Identity (is_large)"))
    assert not notes(model)
