"""External data is read only from the model's folder, or one that the user names, in every command and tensor."""

from __future__ import annotations

import base64
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from fuzz.hostile import bench
from tests.build import parse
from tests.cli.command import contents, graphscale, refuse, succeed
from tests.cli.test_external_data import FEEDS, STEP, WEIGHTS
from tests.conftest import run_once
from tests.ort.artifacts.training_session import FOLDERS

pytestmark = [pytest.mark.static, pytest.mark.sample(4)]

SECRET = np.random.default_rng(7).standard_normal((32, 48)).astype(np.float32)
TO_FILE = ["model/step.onnx", "-o", "out.onnx"]
# Each command with each model that it reads, which lies in `model/`.
CALLS = [(call, file) for call, file in bench.calls_on(".onnx") if "/" not in file]


def external(name: str, location: str, **more: int) -> onnx.TensorProto:
    """A tensor of the secret's shape with its content in a file."""
    tensor = onnx.TensorProto(name=name, data_type=1, dims=SECRET.shape, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def step(location: str, **more: int) -> onnx.ModelProto:
    """A step whose first weight has its content in a file."""
    model = parse(STEP)
    model.graph.initializer.append(external("w1", location, **more))
    second = np.ones(WEIGHTS["w2"], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(second, "w2"))
    return model


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the folders `model` and `secret`, the latter with a key, and ways from one to the other."""
    for name in ("model", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "key").write_bytes(SECRET.tobytes())
    os.symlink("../secret/key", tmp_path / "model" / "link")
    os.symlink("../secret", tmp_path / "model" / "folder")
    os.symlink("link", tmp_path / "model" / "chain")
    os.link(tmp_path / "secret" / "key", tmp_path / "model" / "second")
    (tmp_path / "model" / "inner").mkdir()
    good = parse(STEP)
    for name, shape in WEIGHTS.items():
        good.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(good, tmp_path / "good.onnx")
    return tmp_path


LOCATIONS = [
    "../secret/key",
    "inner/../../secret/key",
    "link",
    "chain",
    "folder/key",
    "second",
    "./link",
    "{}/secret/key",
]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize(("call", "file"), CALLS)
def test_no_command_reads_beyond_the_folder(call: str, file: str, location: str, place: Path) -> None:
    bench.fill(place / "model")
    onnx.save(step(location.format(place)), place / "model" / file)
    refuse(place / "model", *bench.words_of(call), words=[file, "'w1'"])


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_model_in_memory_reads_the_present_folder(
    location: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "model")
    with pytest.raises(gs.errors.ModelFileError, match="'w1'"):
        gs.scale(step(location.format(place)))


DAMAGED = {
    "a missing file": (step("none"), "No such file"),
    "a NUL byte": (step("a\0b"), "null"),
    "a folder": (step("inner"), "regular file"),
    "a pipe": (step("pipe"), "regular file"),
    "a circle": (step("circle"), "symbolic link|loop"),
    "no name": (step(""), "regular file|location"),
    "beyond the end": (step("own", offset=8), "truncated"),
    "a length beyond the end": (step("own", length=10**6), "truncated"),
    "a huge length": (step("own", length=2**70), "truncated"),
    "a negative offset": (step("own", offset=-4), "negative|non-neg"),
    "a negative length": (step("own", length=-4), "negative|non-neg"),
    "a folder by its own name": (step("own/."), "no name of a file"),
    "too short a length": (step("own", length=8), "8 bytes"),
    "an address": (step("*/_ORT_MEM_ADDR_/*"), "an address in its memory"),
}


def test_too_long_a_length(place: Path) -> None:
    """ONNX Runtime does not load it."""
    (place / "model" / "own").write_bytes(SECRET.tobytes() * 2)
    onnx.save(step("own", length=SECRET.nbytes + 4), place / "model" / "step.onnx")
    refuse(place, "scale", *TO_FILE, words=[f"and {SECRET.nbytes + 4} bytes from 0 on are not its shape"])


@pytest.mark.parametrize("words", [["scale"], ["strip"], ["autocast"]])
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_references(name: str, words: list[str], place: Path) -> None:
    model, causes = DAMAGED[name]
    (place / "model" / "own").write_bytes(SECRET.tobytes())
    os.mkfifo(place / "model" / "pipe")
    os.symlink("circle", place / "model" / "circle")
    (place / "model" / "step.onnx").write_bytes(model.SerializeToString())
    done = graphscale(*words, *TO_FILE, folder=place)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert any(cause in done.stderr for cause in causes.split("|")), done.stderr


def test_strings_are_not_external(place: Path) -> None:
    (place / "model" / "own").write_bytes(SECRET.tobytes())
    model = step("own")
    tensor = external("words", "own")
    tensor.data_type = onnx.TensorProto.STRING
    model.graph.initializer.append(tensor)
    onnx.save(model, place / "model" / "step.onnx")
    refuse(place, "scale", *TO_FILE, words=["'words'", "strings cannot be in another file"])


def _in_attribute(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["secret"], value=tensor)
    model.graph.node.insert(0, node)


def _in_body(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    out = onnx.helper.make_tensor_value_info("s", 1, SECRET.shape)
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["secret"], ["s"])], "body", [], [out], [tensor])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.insert(0, onnx.helper.make_node("If", ["yes"], ["q"], then_branch=body, else_branch=body))


def _in_function(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    nodes = [onnx.helper.make_node("Constant", [], ["s"], value=tensor)]
    opset = onnx.helper.make_opsetid("", 20)
    model.functions.append(onnx.helper.make_function("own", "Secret", [], ["s"], nodes, [opset]))
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    model.graph.node.insert(0, onnx.helper.make_node("Secret", [], ["q"], domain="own"))


def _sparse(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    sparse = model.graph.sparse_initializer.add(dims=SECRET.shape)
    sparse.values.CopyFrom(tensor)


PLACES = {"an attribute": _in_attribute, "a body": _in_body, "a function": _in_function, "a sparse one": _sparse}


@pytest.mark.parametrize(("call", "file"), CALLS)
@pytest.mark.parametrize("where", PLACES)
def test_tensors_elsewhere(where: str, call: str, file: str, place: Path) -> None:
    bench.fill(place / "model")
    model = onnx.load(place / "good.onnx")
    PLACES[where](model, external("secret", "../secret/key"))
    (place / "model" / file).write_bytes(model.SerializeToString())
    refuse(place / "model", *bench.words_of(call), words=[file])


def _forge(change: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    """A scaled step whose record of the original was changed."""
    good = parse(STEP)
    for name, shape in WEIGHTS.items():
        good.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    scaled = gs.scale(good).model
    assert isinstance(scaled, onnx.ModelProto)
    entry = next(each for each in scaled.metadata_props if each.key == "graphscale.original")
    record = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(entry.value)))
    change(record)
    entry.value = base64.b64encode(zlib.compress(record.SerializeToString())).decode()
    return scaled


FORGERIES: dict[str, Callable[[onnx.ModelProto], None]] = {
    **{name: lambda record, put=put: put(record, external("secret", "../secret/key")) for name, put in PLACES.items()},
    "an initializer": lambda record: record.graph.initializer.append(external("secret", "../secret/key")),
    "another name": lambda record: setattr(record.graph.initializer[0].external_data[0], "value", "../secret/key"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_record(name: str, place: Path) -> None:
    (place / "model" / "step.onnx").write_bytes(_forge(FORGERIES[name]).SerializeToString())
    refuse(place, "strip", *TO_FILE, words=["step.onnx"])


def test_weights_elsewhere_that_the_user_trusts(place: Path) -> None:
    os.unlink(place / "model" / "second")
    onnx.save(step("../secret/key"), place / "model" / "step.onnx")
    refuse(place, "scale", "model/step.onnx", "-o", "out.onnx", words=[f"--external-data-root {place / 'secret'}"])
    succeed(place, "scale", "model/step.onnx", "-o", "out.onnx", "--external-data-root", "secret")
    assert SECRET.tobytes() in contents(place)["out.onnx.data"]
    outputs, _ = run_once(place / "out.onnx", FEEDS)
    assert np.isfinite(outputs["loss"])
    succeed(place, "scale", "model/step.onnx", "-o", "secret/out.onnx", "--external-data-root", "secret")
    assert "secret/out.onnx.data" not in contents(place)
    assert succeed(place, "verify", "model/step.onnx", "out.onnx", "--external-data-root", "secret")


def test_a_root_that_does_not_hold_it(place: Path) -> None:
    os.unlink(place / "model" / "second")
    onnx.save(step("../secret/key"), place / "model" / "step.onnx")
    refuse(place, "scale", *TO_FILE, "--external-data-root", "model/inner", words=["'w1'"])


def test_a_link_within_the_folder(place: Path) -> None:
    (place / "model" / "inner" / "own").write_bytes(SECRET.tobytes())
    os.symlink("inner/own", place / "model" / "alias")
    for location in ("alias", "inner/own"):
        onnx.save(step(location), place / "model" / "step.onnx")
        succeed(place, "scale", "model/step.onnx", "-o", "out.onnx")
        assert SECRET.tobytes() in contents(place)["out.onnx.data"]


def test_a_link_to_a_model_beside_other_weights(place: Path) -> None:
    """ONNX Runtime reads the weights beside the link."""
    (place / "model" / "own").write_bytes(SECRET.tobytes())
    onnx.save(step("own"), place / "model" / "step.onnx")
    (place / "links").mkdir()
    os.symlink("../model/step.onnx", place / "links" / "step.onnx")
    succeed(place, "scale", "links/step.onnx", "-o", "out.onnx")
    (place / "links" / "own").write_bytes(bytes(SECRET.nbytes))
    refuse(place, "scale", "links/step.onnx", "-o", "new.onnx", words=["'own' beside it is another file"])


@pytest.mark.full
def test_a_folder_of_artifacts(place: Path) -> None:
    folder = place / "artifacts"
    shutil.copytree(next(path for path in sorted(FOLDERS.iterdir()) if path.is_dir()), folder)
    os.symlink(place / "secret" / "key", folder / "notes.txt")
    refuse(place, "scale", "artifacts", "-o", "out", words=["notes.txt"])
    os.unlink(folder / "notes.txt")
    os.link(place / "secret" / "key", folder / "notes.txt")
    refuse(place, "scale", "artifacts", "-o", "out", words=["notes.txt"])
    os.unlink(folder / "notes.txt")
    with (folder / "notes.txt").open("wb") as file:
        file.truncate(2**31)
    refuse(place, "scale", "artifacts", "-o", "out", words=["notes.txt has holes"])
    os.unlink(folder / "notes.txt")
    for name in ("checkpoint", "training_model.onnx"):
        os.rename(folder / name, place / "secret" / name)
        os.symlink(place / "secret" / name, folder / name)
        refuse(place, "scale", "artifacts", "-o", "out", words=[f"{name} leads out of its folder"])
        os.replace(place / "secret" / name, folder / name)
    succeed(place, "scale", "artifacts", "-o", "out")
    os.symlink(place / "secret" / "key", place / "out" / "notes.txt")
    refuse(place, "strip", "out", "-o", "back", words=["notes.txt"])
