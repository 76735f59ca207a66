"""Roles on the command line: the tables, the file that inspect writes and the others read, --keep and --force-roles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.analysis.roles.steps import exchanged_step, hidden_state_step, momentum_step, square_step, update_step
from tests.analysis.test_several_losses import half, two_losses
from tests.build import assert_skips, feeds_for
from tests.cli.command import EARLIER, contents, graphscale, refuse, succeed
from tests.cli.test_scale import rows
from tests.conftest import MODELS, assert_same_bits, run_once


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, folder / "step.onnx")
    return folder / "step.onnx"


def written(folder: Path, content: object, name: str = "roles.json") -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder / name


class TestInspect:
    def test_the_tables(self, tmp_path: Path) -> None:
        table = rows(succeed(None, "inspect", saved(tmp_path, hidden_state_step())))
        assert table["inputs (5)"][0] == "x: batch: no output is its next value"
        assert "w: state, then w_next: depends on its own previous value" in table["inputs (5)"]
        assert table["outputs (4)"] == [
            "loss: loss: the backward pass differentiates it",
            "w_next: next value of w: depends on its own previous value",
            "moved: next value of r: depends on its own previous value",
            "h_next: next value of h? it depends on 'h', and so does a prediction",
        ]

    def test_json(self, tmp_path: Path) -> None:
        model = hidden_state_step()
        found = json.loads(succeed(None, "inspect", saved(tmp_path, model), "--json"))
        assert found["roles"] == gs.roles(model).to_dict()
        assert found["roles"][-1] == {
            "name": "h_next",
            "kind": "output",
            "role": "state",
            "pair": "h",
            "evidence": "it depends on 'h', and so does a prediction",
            "certain": False,
        }

    def test_a_scaled_model_says_what_was_assigned(self, tmp_path: Path) -> None:
        path = saved(tmp_path, hidden_state_step())
        roles = written(tmp_path, {"states": {"h_next": "h"}})
        scaled = tmp_path / "scaled.onnx"
        succeed(None, "scale", path, "-o", scaled, "--roles", roles)
        found = {entry["name"]: entry for entry in json.loads(succeed(None, "inspect", scaled, "--json"))["roles"]}
        assert (found["h_next"]["pair"], found["h_next"]["evidence"], found["h_next"]["certain"]) == (
            "h",
            "named",
            True,
        )

    def test_answers_reach_the_table(self, tmp_path: Path) -> None:
        path, roles = saved(tmp_path, hidden_state_step()), written(tmp_path, {"metrics": ["h_next"]})
        assert rows(succeed(None, "inspect", path, "--roles", roles))["outputs (4)"][-1] == "h_next: metric: named"


class TestTheFile:
    @pytest.mark.parametrize("make", [hidden_state_step, exchanged_step, square_step, momentum_step])
    def test_it_is_accepted_unchanged(self, make: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
        model = make()
        path, roles, scaled = saved(tmp_path, model), tmp_path / "roles.json", tmp_path / "scaled.onnx"
        succeed(None, "inspect", path, "--roles-out", roles)
        succeed(None, "scale", path, "-o", scaled, "--roles", roles)
        content = json.loads(roles.read_text(encoding="utf-8"))
        report = gs.inspect(scaled)
        assert {s.output: s.input for s in report.state}.items() >= content["states"].items()
        assert_skips(gs.ScaledModel(onnx.load(scaled), report), feeds_for(model))
        assert "verified" in succeed(None, "verify", path, scaled, "--runs=1", "--roles", roles)
        mixed = tmp_path / "mixed.onnx"
        succeed(None, "autocast", path, "-o", mixed, "--loss-scale=dynamic", "--roles", roles)
        assert {s.output: s.input for s in gs.inspect(mixed).state}.items() >= content["states"].items()

    def test_it_replaces_an_earlier_one(self, tmp_path: Path) -> None:
        path, roles = saved(tmp_path, square_step()), tmp_path / "roles.json"
        roles.write_bytes(EARLIER)
        for _ in range(2):
            succeed(None, "inspect", path, "--roles-out", roles)
        assert json.loads(roles.read_text(encoding="utf-8"))["open"].keys() == {"v_next"}
        roles.write_text(roles.read_text(encoding="utf-8").replace("[]", '["v_next"]'), encoding="utf-8")
        refuse(tmp_path, "inspect", path, "--roles-out", roles, words=["roles.json", "--force"])
        succeed(None, "inspect", path, "--roles-out", roles, "--force")

    def test_it_is_not_written_for_a_graph_that_is_refused(self, tmp_path: Path) -> None:
        path = saved(tmp_path, update_step(""))
        words = ["--loss nope"]
        refuse(tmp_path, "inspect", path, "--loss=nope", "--roles-out", tmp_path / "roles.json", words=words)

    def test_each_loss_is_named(self, tmp_path: Path) -> None:
        path = saved(tmp_path, two_losses(half("a") + half("b")))
        options = ["--loss", "loss_b", "--loss", "loss_a"]
        succeed(None, "inspect", path, *options, "--roles-out", tmp_path / "roles.json")
        content = json.loads((tmp_path / "roles.json").read_text(encoding="utf-8"))
        assert content["losses"] == ["loss_a", "loss_b"]
        refuse(tmp_path, "inspect", path, *options, "--loss", "other", words=["--loss other"])

    def test_it_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        path = saved(tmp_path, update_step(""))
        refuse(tmp_path, "inspect", path, "--roles-out", tmp_path / "folder", words=["folder"])


@pytest.mark.parametrize("command", ["scale", "autocast"])
class TestTheQuestion:
    def test_it_is_one_line_and_nothing_is_written(self, command: str, tmp_path: Path) -> None:
        path, output = saved(tmp_path, exchanged_step()), tmp_path / "out.onnx"
        output.write_bytes(EARLIER)
        refuse(tmp_path, command, path, "-o", output, words=["2 outputs", "'p'", "'q'", "--roles-out", "--roles"])

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", ["is not JSON"]),
            ("{", ["is not JSON"]),
            ("[" * 100_000, ["is not JSON"]),
            ("\x00", ["is not JSON"]),
            ("[]", ["expected an object", "list"]),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_a_file_of_another_form(self, command: str, content: object, words: Sequence[str], tmp_path: Path) -> None:
        path, roles = saved(tmp_path, update_step("")), written(tmp_path, content)
        refuse(
            tmp_path, command, path, "-o", tmp_path / "out.onnx", "--roles", roles, words=[f"--roles {roles}: ", *words]
        )

    def test_a_file_that_cannot_be_read(self, command: str, tmp_path: Path) -> None:
        path = saved(tmp_path, update_step(""))
        for roles, word in ((tmp_path / "nope.json", "No such file"), (tmp_path, "directory")):
            refuse(tmp_path, command, path, "-o", tmp_path / "out.onnx", "--roles", roles, words=["--roles", word])
        binary = tmp_path / "binary.json"
        binary.write_bytes(b"\xff\xfe\x00{")
        refuse(tmp_path, command, path, "-o", tmp_path / "out.onnx", "--roles", binary, words=["is not JSON"])


class TestScale:
    def test_a_pair_that_the_graph_contradicts(self, tmp_path: Path) -> None:
        path, scaled = saved(tmp_path, momentum_step()), tmp_path / "scaled.onnx"
        swapped = ["--update=m_next=w", "--update=w_next=m"]
        refuse(tmp_path, "scale", path, "-o", scaled, *swapped, words=["it holds 'm' 0.9 times", "--force-roles"])
        succeed(None, "scale", path, "-o", scaled, *swapped, "--force-roles")
        assert {s.output: s.input for s in gs.inspect(scaled).state}.items() >= {"m_next": "w", "w_next": "m"}.items()

    def test_kept_state(self, tmp_path: Path) -> None:
        path, scaled = saved(tmp_path, momentum_step()), tmp_path / "scaled.onnx"
        succeed(None, "scale", path, "-o", scaled, "--keep=n_next", "--keep=m_next")
        feeds = feeds_for(momentum_step(), n=np.int64(3))
        outputs, _ = run_once(onnx.load(scaled), {**feeds, "x": np.full_like(feeds["x"], np.nan)})
        assert outputs["n_next"] == 4 and np.isnan(outputs["m_next"]).all()
        assert_same_bits(outputs["w_next"], feeds["w"], "w")
        before = contents(tmp_path)
        refuse(tmp_path, "scale", path, "-o", scaled, "--keep=nope", words=["--keep nope", "no carried state"])
        assert contents(tmp_path) == before

    def test_a_dry_run_asks_as_well(self, tmp_path: Path) -> None:
        refuse(tmp_path, "scale", saved(tmp_path, square_step()), "--dry-run", words=["'v_next'"])

    def test_the_report(self, tmp_path: Path) -> None:
        printed = succeed(None, "scale", saved(tmp_path, momentum_step()), "-o", tmp_path / "scaled.onnx", "-v")
        assert "n_next: next value of n: depends on its own previous value" in rows(printed)["outputs (4)"]


def test_a_folder_of_artifacts_takes_no_roles(tmp_path: Path) -> None:
    folder, roles = MODELS / "ort" / "artifacts" / "digits_sgd", written(tmp_path, {})
    for option in (f"--roles={roles}", "--keep=a"):
        result = graphscale("scale", folder, "-o", tmp_path / "out", option)
        assert result.returncode == 2 and "is for a single graph" in " ".join(result.stderr.split())
