"""Files that are never lost: those read, and those that graphscale did not write, unless --force is given."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.cli import COMMANDS, make_command
from graphscale.training.metrics import read_metrics
from tests.cli.command import contents, graphscale, refuse, succeed
from tests.cli.test_streams import CALLS as WRITING
from tests.cli.test_streams import made  # noqa: F401
from tests.training.runs import DIGITS, DIGITS_COMMAND

pytestmark = pytest.mark.static

# Each command, with the file that it writes named last.
CALLS: dict[str, tuple[object, ...]] = {
    **{
        name: call
        for name, call in WRITING.items()
        if name not in ("inspect", "train", "verify", "lint", "diff", "doctor")
    },
    "inspect": ("inspect", "step.onnx", "--html", "out.html"),
    "train": (*DIGITS_COMMAND, "--max-steps=2", "-o", "out.onnx"),
    "verify": ("verify", DIGITS, "broken.onnx", "--runs=1", "--numeric", "--save-counterexample", "out.npz"),
    "lint": ("lint", "step.onnx", "--sarif", "out.sarif"),
    "diff": ("diff", DIGITS, "step.onnx", "--html", "out.html"),
}
MORE: tuple[tuple[object, ...], ...] = (
    ("inspect", "step.onnx", "--roles-out", "out.json"),
    (*DIGITS_COMMAND, "--max-steps=2", "--metrics", "out.jsonl"),
    (*DIGITS_COMMAND, "--max-steps=2", "--metrics", "out.csv"),
    ("plot", "run.jsonl", "-o", "out.svg"),
    ("plot", "run.jsonl", "-o", "out.pdf"),
    ("split", "step.onnx", "--stages=2", "-o", "grads.onnx", "out.onnx"),
)
ALL = (*CALLS.values(), *MORE)
MINE = b"the only copy of my thesis, which says: graphscale.scale(model), written by graphscale"


def name_of(call: tuple[object, ...]) -> str:
    return f"{call[0]} {Path(str(call[-1])).suffix}"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:  # noqa: F811
    here = shutil.copytree(made, tmp_path / "here")
    model = onnx.load(here / "step.onnx")
    step = next(node for node in model.graph.node if node.op_type == "Where" and "next" in node.output[0])
    step.input[1], step.input[2] = step.input[2], step.input[1]
    onnx.save(model, here / "broken.onnx")
    return here


def run(folder: Path, *call: object) -> None:
    """Run a command that writes, whose check may fail."""
    done = graphscale(*call, folder=folder)
    assert done.returncode in (0, 1), done.stderr


def test_every_command_is_called() -> None:
    assert {*CALLS, "doctor"} == set(COMMANDS)


@pytest.mark.parametrize("command", CALLS)
def test_every_command_takes_the_hint(command: str) -> None:
    assert any("--force" in parameter.opts for parameter in make_command(command).params)


@pytest.mark.full
@pytest.mark.parametrize("call", ALL, ids=name_of)
def test_a_file_of_the_user(call: tuple[object, ...], folder: Path) -> None:
    """It is refused; what graphscale has written itself is replaced when the same command runs again."""
    out = folder / str(call[-1])
    out.write_bytes(MINE)
    refuse(folder, *call, words=(out.name, "--force"))
    run(folder, *call, "--force")
    first = out.read_bytes()
    assert first != MINE
    run(folder, *call)
    assert out.read_bytes()[:16] == first[:16]


@pytest.mark.full
@pytest.mark.parametrize("call", ALL, ids=name_of)
def test_an_existing_file_in_other_places(call: tuple[object, ...], folder: Path) -> None:
    """An empty file, and one that a link leads to: the link is replaced, the file stays."""
    out = folder / str(call[-1])
    out.touch()
    run(folder, *call)
    assert out.stat().st_size
    (folder / "mine").write_bytes(MINE)
    out.unlink()
    out.symlink_to("mine")
    refuse(folder, *call, words=(out.name, "--force"))
    assert (folder / "mine").read_bytes() == MINE


SPELLINGS = ("the same", "another spelling", "a symbolic link", "a hard link", "a link to the folder")


def spell(folder: Path, name: str, spelling: str) -> str:
    """Give a file another name."""
    match spelling:
        case "another spelling":
            return f"../{folder.name}/./{name}"
        case "a symbolic link":
            (folder / "link").symlink_to(name)
            return "link"
        case "a hard link":
            (folder / "hard").hardlink_to(folder / name)
            return "hard"
        case "a link to the folder":
            (folder / "there").symlink_to(".")
            return f"there/{name}"
    return name


OWN = {
    "scale": ("plain.onnx", ("scale", "plain.onnx", "-o")),
    "autocast": ("plain.onnx", ("autocast", "plain.onnx", "-o")),
    "lower": ("step.onnx", ("lower", "step.onnx", "-o")),
    "lower-training": ("plain.onnx", ("lower-training", "plain.onnx", "-o")),
    "strip": ("step.onnx", ("strip", "step.onnx", "-o")),
    "split": ("step.onnx", ("split", "step.onnx", "-o", "grads.onnx")),
    "fuse": ("artifacts/eval_model.onnx", ("fuse", "artifacts", "-o")),
    "export-weights": ("state.npz", ("export-weights", "state.npz", "plain.onnx", "-o")),
    "train": ("step.onnx", (*DIGITS_COMMAND, "-o")),
    "train --data": ("data.npz", (*DIGITS_COMMAND, "-o")),
    "verify": ("step.onnx", ("verify", "plain.onnx", "step.onnx", "--save-counterexample")),
    "lint": ("step.onnx", ("lint", "step.onnx", "--sarif")),
    "diff": ("step.onnx", ("diff", "plain.onnx", "step.onnx", "--html")),
    "inspect": ("step.onnx", ("inspect", "step.onnx", "--html")),
    "inspect --roles": ("roles.json", ("inspect", "plain.onnx", "--roles=roles.json", "--roles-out")),
    "plot": ("run.png", ("plot", "run.png", "-o")),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("call", OWN)
def test_its_own_input(call: str, spelling: str, folder: Path) -> None:
    name, words = OWN[call]
    shutil.copy(DIGITS, folder / "plain.onnx")
    shutil.copy(folder / "run.jsonl", folder / "run.png")
    succeed(folder, "inspect", "plain.onnx", "--roles-out", "roles.json")
    shutil.copytree(WRITING["fuse"][1], folder / "artifacts")  # type: ignore[type-var]
    before = (folder / name).read_bytes()
    refuse(folder, *words, spell(folder, name, spelling), words=("--force",))
    assert (folder / name).read_bytes() == before


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A folder with a model whose weights are in `weights.bin`."""
    model = onnx.load(DIGITS)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return tmp_path


def test_the_weights_of_its_input(external: Path) -> None:
    refuse(external, "scale", "m.onnx", "-o", "weights.bin", words=("weights.bin",))
    refuse(external, "scale", "m.onnx", "-o", "weights.bin", "--force", words=("holds weights of the model",))
    before = contents(external)
    with pytest.raises(gs.GraphscaleError, match="holds weights of the model"):
        gs.scale(external / "m.onnx").save(external / "weights.bin")
    assert contents(external) == before


def test_a_file_with_the_name_of_the_weights(external: Path) -> None:
    (external / "out").mkdir()
    data = external / "out" / "s.onnx.data"
    data.write_bytes(MINE)
    refuse(external, "scale", "m.onnx", "-o", "out/s.onnx", words=("s.onnx.data", "--force"))
    succeed(external, "scale", "m.onnx", "-o", "out/s.onnx", "--force")
    succeed(external, "scale", "m.onnx", "-o", "out/s.onnx")
    assert data.read_bytes() != MINE


def test_a_stage(folder: Path) -> None:
    (folder / "grads.2.onnx").write_bytes(MINE)
    refuse(folder, *WRITING["split"], "--stages=2", words=("grads.2.onnx", "--force"))


def test_a_stage_with_the_name_of_the_step(folder: Path) -> None:
    shutil.copy(folder / "step.onnx", folder / "new.2.onnx")
    words = ["split", "new.2.onnx", "-o", "new.onnx", "update.onnx", "--stages=2"]
    refuse(folder, *words, words=("new.2.onnx is read, and would be replaced", "--force"))


def test_a_file_with_the_name_of_new_weights(external: Path) -> None:
    (external / "out").mkdir()
    (external / "out" / "s.onnx.data.new").write_bytes(MINE)
    succeed(external, "scale", "m.onnx", "-o", "out/s.onnx")
    refuse(external, "scale", "m.onnx", "-o", "out/s.onnx", words=("s.onnx.data.new", "--force"))
    assert (external / "out" / "s.onnx.data.new").read_bytes() == MINE


def test_a_model_that_states_its_roles_is_the_users(folder: Path) -> None:
    """Exporters write `graphscale.roles`: that is no mark."""
    model = onnx.load(DIGITS)
    model.metadata_props.add(key="graphscale.roles", value="{}")
    onnx.save(model, folder / "out.onnx")
    refuse(folder, "scale", DIGITS, "-o", "out.onnx", words=("--force",))


def test_the_hint(folder: Path) -> None:
    """The command with --force does what the error says that it does."""
    (folder / "my graph.onnx").write_bytes(MINE)
    call = ["scale", str(DIGITS), "-o", "my graph.onnx"]
    message = graphscale(*call, folder=folder).stderr
    option = re.search(r"pass (--\S+)$", message.strip())
    assert option is not None
    run(folder, *shlex.split(f"{shlex.join(call)} {option[1]}"))


def test_a_dry_run_is_not_refused(folder: Path) -> None:
    (folder / "out.onnx").write_bytes(MINE)
    succeed(folder, "scale", DIGITS, "-o", "out.onnx", "--dry-run")


def test_from_python_a_file_is_replaced(folder: Path) -> None:
    """As `onnx.save` and `numpy.save` do."""
    (folder / "out.onnx").write_bytes(MINE)
    gs.scale(DIGITS).save(folder / "out.onnx")
    gs.scale(DIGITS).save(folder / "out.onnx")
    assert gs.inspect(folder / "out.onnx").policy is not None


@pytest.mark.full
def test_halves_are_both_there_or_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file cannot take its name."""
    for existing in (False, True):
        if existing:
            succeed(folder, "split", "step.onnx", "-o", "grads.onnx", "update.onnx", "--stages=2")
            gs.scale(DIGITS, 2.0**5, skip_nonfinite=True).save(folder / "step.onnx")
        before = contents(folder)
        for failing in range(1, 4):
            calls = iter(range(1, 100))
            real = os.replace

            def replace(source: object, target: object, *, at: int = failing) -> None:
                if next(calls) == at:  # noqa: B023
                    raise OSError(5, "Input/output error")
                real(source, target)  # type: ignore[call-overload]  # noqa: B023

            monkeypatch.setattr(os, "replace", replace)
            done = graphscale("split", "step.onnx", "-o", "grads.onnx", "update.onnx", "--stages=2", folder=folder)
            monkeypatch.undo()
            assert done.returncode == 2 and "Input/output error" in done.stderr
            assert contents(folder) == before


def test_arrays_that_are_the_users(folder: Path) -> None:
    np.savez(folder / "out.npz", thesis=np.zeros(3))
    refuse(folder, *CALLS["verify"], words=("out.npz", "--force"))


@pytest.mark.full
def test_a_torn_row_of_metrics(folder: Path) -> None:
    """A reader leaves it out, and a run that is resumed writes it whole."""
    call = (*DIGITS_COMMAND, "--checkpoint-dir=run", "--checkpoint-every=2", "--quiet", "--resume")
    succeed(folder, *call, "--max-steps=6", "--metrics=whole.jsonl")
    shutil.rmtree(folder / "run")
    succeed(folder, *call, "--max-steps=4", "--metrics=torn.jsonl")
    whole, torn = folder / "whole.jsonl", folder / "torn.jsonl"
    with torn.open("ab") as file:
        file.write(whole.read_bytes()[torn.stat().st_size :][:50])
    assert [record.step for record in read_metrics(torn)] == [1, 2, 3, 4]
    succeed(folder, *call, "--max-steps=6", "--metrics=torn.jsonl")
    assert torn.read_bytes() == whole.read_bytes()
