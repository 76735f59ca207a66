"""The question on the command line, and `--accept`, which takes the proposals."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import graphscale as gs
from graphscale.errors import LossError, RolesError
from tests.analysis.roles.steps import exchanged_step, hidden_state_step, update_step
from tests.analysis.test_loss_choice import SUMS, ZERO
from tests.build import feeds_for, parse
from tests.cases.steps import proposals
from tests.cli.command import TERMINAL, contents, graphscale, refuse, succeed
from tests.conftest import MODELS, assert_all_same_bits, run_once

REMEDY = "to take the proposals: "


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, folder / "a step.onnx")
    return folder / "a step.onnx"


def ask_in_terminal(*arguments: Any) -> list[str]:
    """Run a command whose stderr is a terminal, and return the lines that it prints there."""
    control, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "graphscale", *map(str, arguments)],
            env={**os.environ, **TERMINAL, "TERM": "dumb"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=terminal,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, b"")
        os.set_blocking(control, False)
        return list(filter(None, os.read(control, 2**16).decode().splitlines()))
    finally:
        os.close(control)
        os.close(terminal)


def many_open(count: int) -> onnx.ModelProto:
    """A step with so many outputs without evidence for a pair."""
    names = [f"h{i}" for i in range(count)]
    return update_step(
        "; ".join(f"{name}_next = dw * dw" for name in names), ", ".join(f"float[4,3] {name}" for name in names)
    )


def test_the_proposals_are_those_of_inspect(tmp_path: Path) -> None:
    model = exchanged_step()
    path, scaled = saved(tmp_path, model), tmp_path / "scaled.onnx"
    lines = succeed(None, "scale", path, "-o", scaled, "--accept", "--no-try").splitlines()
    opened = gs.roles(model).open
    assert (
        lines[2:] == [f"{entry.name}: {str(entry).replace('? ', ': accepted: ')}" for entry in opened]
        and len(opened) == 2
    )
    by_file = gs.scale(model, roles=proposals(model)).model
    feeds = feeds_for(model)
    assert_all_same_bits(run_once(onnx.load(scaled), feeds)[0], run_once(by_file, feeds)[0])


def test_the_file_says_so_until_it_is_stripped(tmp_path: Path) -> None:
    model = hidden_state_step()
    path, scaled, original = saved(tmp_path, model), tmp_path / "scaled.onnx", tmp_path / "original.onnx"
    succeed(None, "scale", path, "-o", scaled, "--accept")
    metadata = {entry.key: entry.value for entry in onnx.load(scaled).metadata_props}
    assert json.loads(metadata["graphscale.accepted"]) == ["h_next"]
    shown = succeed(None, "inspect", scaled, "-v")
    assert "h_next: next value of h: accepted: it depends on 'h'" in shown
    succeed(None, "strip", scaled, "-o", original)
    assert onnx.load(original) == gs.strip(gs.scale(model, roles=proposals(model)).model)
    verified = succeed(None, "verify", path, scaled, "--runs=1")
    assert "note: the proposed roles of h_next were accepted" in verified and "verified" in verified


def test_verify_finds_a_proposal_that_the_file_does_not_name() -> None:
    model = exchanged_step()
    scaled = gs.scale(model, accept=True).model
    assert gs.verify(model, scaled, runs=0).ok
    (entry,) = (entry for entry in scaled.metadata_props if entry.key == "graphscale.accepted")
    names = json.loads(entry.value)
    entry.value = json.dumps(names[:1])
    report = gs.verify(model, scaled, runs=0)
    assert not report.ok and any(f"lacks {names[1]!r}" in check.detail for check in report.checks)
    scaled.metadata_props.remove(entry)
    with pytest.raises(RolesError):
        gs.verify(model, scaled, runs=0)


def test_nothing_is_accepted_where_nothing_is_open(tmp_path: Path) -> None:
    path, scaled = saved(tmp_path, update_step("")), tmp_path / "scaled.onnx"
    assert len(succeed(None, "scale", path, "-o", scaled, "--accept", "--no-try").splitlines()) == 2
    assert "graphscale.accepted" not in {entry.key for entry in onnx.load(scaled).metadata_props}


def test_answers_come_before_proposals() -> None:
    report = gs.scale(exchanged_step(), roles={"metrics": ["p"]}, accept=True).report
    roles = {entry.name: entry for entry in report.roles}
    assert (roles["p"].role, roles["p"].evidence) == ("metric", "named")


def test_an_accepted_state_may_be_kept() -> None:
    model = hidden_state_step()
    with pytest.raises(RolesError, match="h_next"):
        gs.scale(model, keep=["h_next"])
    assert gs.scale(model, accept=True, keep=["h_next"]).report.proved


def test_an_open_loss() -> None:
    model = update_step(constants=ZERO, stored=True, **SUMS["one loss"])
    with pytest.raises(RolesError, match="'loss'") as caught:
        gs.scale(model)
    (entry,) = (entry for entry in caught.value.table.open if entry.role == "loss")  # type: ignore[attr-defined]
    report = gs.scale(model, accept=True).report
    assert report.loss == entry.name and report.loss_found == entry.evidence
    assert {e.name for e in report.roles if e.evidence == f"accepted: {entry.evidence}"} == {entry.name}


def test_a_loss_without_a_proposal() -> None:
    model = parse("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[8,4] x, float[4,3] w) => (float[8,3] y) { y = MatMul(x, w) }""")
    with pytest.raises(LossError) as caught:
        gs.scale(model)
    assert "--accept" not in str(caught.value)
    with pytest.raises(LossError, match="no proposal for the loss that --accept could take"):
        gs.scale(model, accept=True)


class TestTheTable:
    def test_the_command_is_right(self, tmp_path: Path) -> None:
        path, scaled = saved(tmp_path, hidden_state_step()), tmp_path / "it's scaled.onnx"
        before = contents(tmp_path)
        lines = ask_in_terminal("scale", path, "-o", scaled, "--loss-scale=torch", "--telemetry")
        assert contents(tmp_path) == before
        header, row = ([cell.strip() for cell in re.split("[┃│]", lines[i])] for i in (0, 2))
        assert header == ["output", "proposal", "why", "other candidates"]
        assert row[:2] == ["h_next", "next value of h"] and row[3] == "t, a metric"
        assert row[2].startswith("it depends on 'h', and so does a")  # a narrow terminal folds the rest
        assert lines[-1].startswith("graphscale: nothing was written: ") and "--roles-out" in lines[-1]
        (command,) = (line.removeprefix(REMEDY) for line in lines if line.startswith(REMEDY))
        program, *words = shlex.split(command)
        assert program == "graphscale"
        succeed(tmp_path, *words)
        report = gs.inspect(scaled)
        assert report.policy is not None and report.policy["config"]["initial_loss_scale"] == 65536
        assert {state.output for state in report.state} >= {"h_next"}

    def test_words_after_a_separator(self, tmp_path: Path) -> None:
        path = saved(tmp_path, hidden_state_step())
        (command,) = (
            line.removeprefix(REMEDY)
            for line in ask_in_terminal("scale", "--dry-run", "--", path)
            if line.startswith(REMEDY)
        )
        succeed(None, *shlex.split(command)[1:])

    @pytest.mark.parametrize(("count", "last"), [(20, None), (23, "and 3 more")])
    def test_at_most_twenty_rows(self, count: int, last: str | None, tmp_path: Path) -> None:
        lines = ask_in_terminal("scale", saved(tmp_path, many_open(count)), "--dry-run")
        assert sum(bool(re.match(r"h\d+_next ", line)) for line in lines) == 20
        assert [line for line in lines if line.startswith("and ")] == ([last] if last else [])

    def test_a_command_without_the_option(self, tmp_path: Path) -> None:
        lines = ask_in_terminal("autocast", saved(tmp_path, hidden_state_step()), "-o", tmp_path / "out.onnx")
        assert lines[2].startswith("h_next") and not any(REMEDY in line for line in lines)

    def test_quiet(self, tmp_path: Path) -> None:
        (line,) = ask_in_terminal("scale", saved(tmp_path, hidden_state_step()), "--dry-run", "-q")
        assert line.startswith("graphscale: one output has no certain role: 'h_next'")


class TestOtherStreams:
    def test_a_pipe_gets_one_line(self, tmp_path: Path) -> None:
        words = ["'h_next': next value of h? it depends", "--accept", "--roles-out"]
        refuse(tmp_path, "scale", saved(tmp_path, hidden_state_step()), "-o", tmp_path / "out.onnx", words=words)

    def test_many_rows_leave_room_for_the_remedy(self, tmp_path: Path) -> None:
        words = ["40 outputs", "and 35 more", "--accept", "--roles FILE.json"]
        refuse(tmp_path, "scale", saved(tmp_path, many_open(40)), "--dry-run", words=words)

    def test_json_has_the_rows(self, tmp_path: Path) -> None:
        done = graphscale("scale", saved(tmp_path, many_open(40)), "--dry-run", "--json")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        found = json.loads(done.stdout)
        assert len(found["open"]) == 40 and f"graphscale: {found['error']}\n" == done.stderr
        first = found["open"][0]
        assert first.keys() == {"output", "role", "pair", "why", "others"}
        assert first["output"] == "h0_next" and first["pair"] not in first["others"]
        assert {first["pair"], *first["others"]} == {f"h{i}" for i in range(40)}

    def test_accept_is_for_a_single_graph(self, tmp_path: Path) -> None:
        folder = MODELS / "ort/artifacts/digits_sgd"
        refuse(tmp_path, "scale", folder, "-o", tmp_path / "out", "--accept", words=["--accept is for a single graph"])
