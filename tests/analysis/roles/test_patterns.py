"""A pattern in `updates` pairs all outputs and inputs that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.errors import RolesError, UpdateError
from tests.analysis.roles.steps import MOMENTUM, update_step
from tests.analysis.roles.test_names import OPEN, TWO, rename
from tests.build import linear_step
from tests.cli.command import refuse, succeed

pytestmark = pytest.mark.static


TURNED = {"m": "x1", "n": "x2", "m_next": "y2", "n_next": "y1"}


def open_step() -> onnx.ModelProto:
    """A step with two outputs, `a_next` and `b_next`, that the graph does not pair."""
    outputs = "float[4,3] p, float[4,3] q"
    model = update_step(OPEN, f"{TWO}, float[4,3] m", outputs, update=MOMENTUM)
    return rename(model, {"p": "a_next", "q": "b_next"})


def pairs(model: onnx.ModelProto, updates: Mapping[str, str]) -> dict[str | None, str]:
    report = gs.scale(model, 1024, updates=updates).report
    return {state.output: state.input for state in report.state}


def test_all_pairs() -> None:
    expected = {f"{name}_next": name for name in ("a", "b", "m", "w")}
    assert pairs(open_step(), {"{}_next": "{}"}) == expected
    report = gs.inspect(open_step(), updates={"{}_next": "{}"})
    assert {e.evidence for e in report.roles if e.pair is not None} == {"stated by --update {}_next={}"}


@pytest.mark.parametrize(
    ("pattern", "source"), [("new.{}", "old.{}"), ("{}.out", "{}"), ("{}_1", "in_{}"), ("a{}z", "{}")]
)
def test_forms_of_names(pattern: str, source: str) -> None:
    stems = {"a_next": "first", "b_next": "second", "m_next": "third", "w_next": "fourth"}
    names = {output: pattern.replace("{}", stem) for output, stem in stems.items()}
    names |= {output.removesuffix("_next"): source.replace("{}", stem) for output, stem in stems.items()}
    model = rename(open_step(), names)
    expected = {names[output]: names[output.removesuffix("_next")] for output in stems}
    assert pairs(model, {pattern: source}) == expected


def test_a_single_pair_comes_before_the_pattern() -> None:
    found = pairs(open_step(), {"{}_next": "{}", "a_next": "b", "b_next": "a"})
    assert found == {"a_next": "b", "b_next": "a", "m_next": "m", "w_next": "w"}


def test_other_outputs_are_judged_as_before() -> None:
    model = rename(open_step(), {"a_next": "p", "b_next": "q"})
    asked = dict[str, list[str]]()
    for updates in (None, {"{}_next": "{}"}):
        with pytest.raises(RolesError) as caught:
            gs.scale(model, updates=updates)
        asked[str(updates)] = [str(entry) for entry in caught.value.table.open]  # type: ignore[attr-defined]
    before, after = asked.values()
    assert before == after and len(before) == 2


@pytest.mark.parametrize("pattern", [("{}_new", "{}"), ("{}_next", "{}_old"), ("{}", "{}")])
def test_a_pattern_that_names_nothing(pattern: tuple[str, str]) -> None:
    with pytest.raises(UpdateError, match=r"--update .*: the pattern names no output together with an input"):
        gs.scale(open_step(), updates=dict([pattern]))


def test_two_patterns_that_disagree() -> None:
    model = rename(open_step(), {"a_next": "a_b_next", "b": "a_b"})
    with pytest.raises(
        UpdateError, match=r"--update \{\}_b_next=\{\} a_b_next=a: --update \{\}_next=\{\} pairs it with 'a_b'"
    ):
        gs.scale(model, updates={"{}_next": "{}", "{}_b_next": "{}"})


def test_a_pair_of_two_types() -> None:
    model = rename(open_step(), {"x": "a", "a": "x"})
    with pytest.raises(UpdateError, match=r"--update \{\}_next=\{\} a_next=a: .* dtypes and shapes must be the same"):
        gs.scale(model, updates={"{}_next": "{}"})


def test_an_unreduced_loss_is_no_next_value() -> None:
    """Only a pair that is named alone says more than the graph."""
    model = rename(update_step("", "float[8,3] k", "float[8,3] square"), {"square": "k_next"})
    assert gs.scale(model, updates={"k_next": "k"}).report.proved
    with pytest.raises(RolesError, match=r"--update \{\}_next=\{\}: output k_next .* but the loss is its mean"):
        gs.scale(model, updates={"{}_next": "{}"})


def test_a_pair_that_the_graph_excludes() -> None:
    model = rename(update_step("m_next = m * beta + dw; n_next = n * beta - dw", "float[4,3] m, float[4,3] n"), TURNED)
    for force in (False, True):
        with pytest.raises(RolesError, match=r"--update y\{\}=x\{\}: output y. .* holds 'x.' 0.9 times, .* --roles"):
            gs.scale(model, updates={"y{}": "x{}"}, force_roles=force)


def test_a_gradient_is_no_next_value() -> None:
    model = linear_step(inputs="float[4,3] w", outputs="float[4,3] dw")
    with pytest.raises(UpdateError, match=r"--update d\{\}=\{\} dw=w: the output is a gradient"):
        gs.scale(model, updates={"d{}": "{}"})


def test_names_with_braces() -> None:
    braced = {"a": "{}", "a_next": "{}_next", "b": "b{}", "b_next": "b_{}_next"}
    model = rename(open_step(), braced)
    found = pairs(model, {"{}_next": "{}", "b_{}_next": "b{}"})
    assert found == {"{}_next": "{}", "b_{}_next": "b{}", "m_next": "m", "w_next": "w"}
    # Other braces are no pattern.
    with pytest.raises(UpdateError, match=r"no output '\{\{\}\}_next'"):
        gs.scale(model, updates={"{{}}_next": "a"})


def test_the_command_line(tmp_path: Path) -> None:
    path, scaled = tmp_path / "step.onnx", tmp_path / "scaled.onnx"
    onnx.save(open_step(), path)
    succeed(None, "scale", path, "-o", scaled, "--update", "{}_next={}")
    assert {state.output for state in gs.inspect(scaled).state} > {f"{name}_next" for name in ("a", "b", "m", "w")}
    assert "verified" in succeed(None, "verify", path, scaled, "--runs=0", "--update={}_next={}")
    refuse(tmp_path, "inspect", path, "--update={}_new={}", words=["--update {}_new={}: the pattern names no output"])
