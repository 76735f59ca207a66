"""Small files that need too much time or memory: refused in one line that names the limit."""

from __future__ import annotations

import base64
import itertools
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as h
import pytest

import graphscale as gs
from fuzz.hostile import bench, growth, packed, processes
from graphscale.errors import ModelFileError
from graphscale.files import model_size
from graphscale.files.limits import Limits, limiting
from graphscale.files.ort_checkpoint import read_checkpoint
from graphscale.files.tensor_files import read_npz
from tests.build import step
from tests.cli.bad_graphs import sgd
from tests.cli.command import graphscale, refuse, succeed
from tests.fuzzing.holding import limited

pytestmark = [pytest.mark.static, pytest.mark.sample(2)]

CALLS = bench.calls_on(".onnx")


def with_functions(levels: int, calls: int, *, circular: bool = False) -> onnx.ModelProto:
    """A step that calls a function, which calls the next one some times, and so on."""
    model = step()
    model.opset_import.append(h.make_opsetid("own", 1))
    for level in range(levels):
        names = ["x", *(f"t{i}" for i in range(calls - 1)), "y"]
        called = ("Identity", "") if level == levels - 1 else (f"F{level + 1}", "own")
        called = ("F0", "own") if circular and not called[1] else called
        nodes = [h.make_node(called[0], [a], [b], domain=called[1]) for a, b in itertools.pairwise(names)]
        opsets = [h.make_opsetid("", 20), h.make_opsetid("own", 1)]
        model.functions.append(h.make_function("own", f"F{level}", ["x"], ["y"], nodes, opsets))
    model.graph.node.append(h.make_node("F0", ["loss"], ["seen"], domain="own"))
    return model


def nested(levels: int) -> onnx.ModelProto:
    """A step with If in If."""
    model, body = step(), onnx.GraphProto()
    for level in range(levels):
        inner = h.make_node("Identity", ["loss"], [f"o{level}"])
        if level:
            inner = h.make_node("If", ["yes"], [f"o{level}"], then_branch=body, else_branch=_leaf(level))
        body = h.make_graph([inner], f"b{level}", [], [h.make_tensor_value_info(f"o{level}", 1, [])])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(h.make_node("If", ["yes"], ["q"], then_branch=body, else_branch=_leaf(levels)))
    return model


def _leaf(level: int) -> onnx.GraphProto:
    node, out = h.make_node("Identity", ["loss"], [f"e{level}"]), h.make_tensor_value_info(f"e{level}", 1, [])
    return h.make_graph([node], f"e{level}", [], [out])


BOMBS = {
    "functions of two calls in 24 levels": (with_functions(25, 2), "--max-nodes"),
    "functions in 500 levels": (with_functions(500, 1), "--max-depth"),
    "a function called 8192 times": (with_functions(14, 2), "onnx.inliner"),
    "a function that calls itself": (with_functions(1, 1, circular=True), "'own::F0' calls itself"),
    "functions that call each other": (with_functions(3, 2, circular=True), "calls itself"),
    "30 nested If": (nested(30), "--max-depth"),
}


@pytest.mark.parametrize(("call", "file"), CALLS)
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_of_nodes(name: str, call: str, file: str, folder: Path) -> None:
    model, words = BOMBS[name]
    (folder / file).write_bytes(model.SerializeToString())
    with limited(10, 2 * 2**30):
        refuse(folder, *bench.words_of(call), words=[file, words])


# Without a memo, a worklist or the last suffix each would take minutes to years.
GROWTH = {
    "sums of zeros": ("inspect bad.onnx", growth.all_zeros(16, 3)),
    "nested If before the loss": ("scale bad.onnx --dry-run", growth.nested_flow("If", 14, 4, "x")),
    "nested Loop before the loss": ("scale bad.onnx --dry-run", growth.nested_flow("Loop", 8, 3, "x")),
    "nested Loop behind a gradient": ("scale bad.onnx --dry-run", growth.nested_flow("Loop", 12, 3, "dw1")),
    "a shift register": ("inspect bad.onnx", growth.shift_register(10_000)),
    "nested shift registers": ("inspect bad.onnx", growth.shift_register(40, 5)),
    "equal names": ("inspect bad.onnx", growth.equal_names(30_000)),
    "a doubled shape": ("inspect bad.onnx", growth.doubled_shape(40)),
    "many readers of a gradient": ("scale bad.onnx --dry-run", growth.many_readers(10_000)),
    "identities behind a gradient": ("lint bad.onnx", growth.identities(1500)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", GROWTH)
def test_models_that_need_not_grow(name: str, folder: Path) -> None:
    words, model = GROWTH[name]
    onnx.save(model, folder / "bad.onnx")
    with limited(10, 2 * 2**30):
        succeed(folder, *words.split())


@pytest.mark.full
@pytest.mark.parametrize("model", [growth.deep_body(1500), growth.wide_sum(6000)], ids=["deep body", "wide sum"])
def test_lint_of_scaled_models_that_need_not_grow(model: onnx.ModelProto, folder: Path) -> None:
    gs.scale(model).save(folder / "scaled.onnx")
    with limited(10):
        succeed(folder, "lint", "scaled.onnx")


@pytest.mark.parametrize(("operator", "count"), [("And", 40), ("Or", 40), ("Not", 1500), ("Identity", 1500)])
def test_a_long_way_from_the_check_to_its_flag(operator: str, count: int, folder: Path) -> None:
    onnx.save(sgd(), folder / "original.onnx")
    scaled = gs.scale(sgd()).model
    growth.chained_flag(scaled, operator, count)
    onnx.save(scaled, folder / "scaled.onnx")
    with limited(10):
        done = graphscale("verify", "original.onnx", "scaled.onnx", "--runs=0", folder=folder)
    assert (done.returncode, done.stderr) == (1, ""), "another node gives the flag"


@pytest.mark.full
def test_many_numbers(folder: Path) -> None:
    onnx.save(growth.many_numbers(5000), folder / "bad.onnx")
    with limited(10):
        refuse(folder, "inspect", "bad.onnx", words=["5001 outputs could be the loss"])


@pytest.mark.full
@pytest.mark.parametrize(("count", "levels"), [(3000, 1), (60, 6)])
def test_many_rounds_settle(count: int, levels: int, folder: Path) -> None:
    onnx.save(growth.shift_register(count, levels, summed=True), folder / "deep.onnx")
    with limited(10):
        assert graphscale("inspect", "deep.onnx", folder=folder).returncode == 0


def test_if_in_more_levels_than_protobuf_reads(folder: Path) -> None:
    content = b""
    for _ in range(300):  # GraphProto.node, NodeProto.attribute, AttributeProto.g
        for field in (0x32, 0x2A, 0x0A):
            content = bytes([field]) + _varint(len(content)) + content
    (folder / "bad.onnx").write_bytes(b"\x08\x0a" + b"\x3a" + _varint(len(content)) + content)
    refuse(folder, "scale", "bad.onnx", "-o", "out.onnx", words=["bad.onnx", "is not an ONNX model"])


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low]) if not high else bytes([low | 0x80]) + _varint(high)


def test_many_inputs(folder: Path) -> None:
    model = step()
    model.graph.input.extend(h.make_tensor_value_info(f"i{i}", 1, []) for i in range(2000))
    onnx.save(model, folder / "bad.onnx")
    refuse(folder, "inspect", "bad.onnx", "--max-nodes", "1000", words=["inputs and outputs; the limit is 1000"])


def test_limits_can_be_raised(folder: Path) -> None:
    onnx.save(nested(17), folder / "bad.onnx")
    refuse(folder, "inspect", "bad.onnx", words=["17 levels", "the limit is 16"])
    succeed(folder, "inspect", "bad.onnx", "--max-depth", "17")
    refuse(folder, "inspect", "bad.onnx", "--max-depth", "17", "--max-nodes", "10", words=["the limit is 10"])
    with pytest.raises(gs.errors.ModelFileError, match="--max-depth"):
        gs.inspect(folder / "bad.onnx")
    with limiting(Limits(max_depth=17)):
        gs.inspect(folder / "bad.onnx")


@pytest.mark.full
def test_many_outputs(folder: Path) -> None:
    model = step()
    for i in range(10_000):
        model.graph.output.append(h.make_tensor_value_info(f"o{i}", 1, []))
        model.graph.node.append(h.make_node("Identity", ["loss"], [f"o{i}"]))
    onnx.save(model, folder / "bad.onnx")
    refuse(folder, "scale", "bad.onnx", "-o", "out.onnx", "--max-nodes", "1000", words=["--max-nodes"])
    refuse(folder, "scale", "bad.onnx", "-o", "out.onnx", words=["10001 outputs could be the loss", "--loss"])
    succeed(folder, "scale", "bad.onnx", "-o", "out.onnx", "--loss", "loss")


def _size_of_input(size: int) -> onnx.ModelProto:
    model = step()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size
    return model


def _tensor(*dims: int, content: bytes = b"") -> onnx.ModelProto:
    model = step()
    model.graph.initializer.append(onnx.TensorProto(name="big", data_type=1, dims=dims, raw_data=content))
    return model


SIZES = {
    "an input of 2**62": _size_of_input(2**62),
    "a negative input": _size_of_input(-5),
    "a tensor of 2**64": _tensor(2**62, 4),
    "a tensor of 60 GB": _tensor(15 * 10**9),
    "a tensor of 2**64 with content": _tensor(2**62, 4, content=b"1234"),
    "a negative tensor": _tensor(-3, content=b"1234"),
}


@pytest.mark.parametrize(("call", "file"), CALLS)
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, call: str, file: str, folder: Path) -> None:
    onnx.save(SIZES[name], folder / file)
    assert processes.hold([*bench.words_of(call), "--force"], folder) is None


def _packed(size: int) -> str:
    packer = zlib.compressobj(9)
    pieces = [packer.compress(bytes(2**20)) for _ in range(size >> 20)]
    return base64.b64encode(b"".join(pieces) + packer.flush()).decode()


@pytest.mark.full
def test_a_record_that_unpacks_to_much(folder: Path) -> None:
    model = onnx.load(folder / "step.onnx")
    next(entry for entry in model.metadata_props if entry.key == "graphscale.original").value = _packed(600 * 2**20)
    onnx.save(model, folder / "bad.onnx")
    refuse(folder, "strip", "bad.onnx", "-o", "out.onnx", words=["bad.onnx", "--max-bytes"])
    done = graphscale("verify", "original.onnx", "bad.onnx", "--runs", "0", folder=folder)
    assert (done.returncode, done.stderr) == (1, "") and "the record of the original is damaged" in done.stdout


@pytest.mark.full
def test_packed_arrays(folder: Path) -> None:
    packed = zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED)
    with packed as archive, archive.open("x.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, _header(2**30 // 2))
        for _ in range(2**11):
            file.write(bytes(2**20))
    refuse(folder, "verify", "original.onnx", "step.onnx", "--feeds", "bomb.npz", words=["bomb.npz", "--max-bytes"])
    refuse(folder, "train", "step.onnx", "--data", "bomb.npz", words=["bomb.npz", "--max-bytes"])


def _header(count: int) -> dict[str, object]:
    return {"descr": "<f4", "fortran_order": False, "shape": (count,)}


# --- parts without content --------------------------------------------------------------------------------------------


def parts(path: Sequence[int], count: int) -> bytes:
    """The graph of a step, and parts without content."""
    return step().SerializeToString() + packed.empty_parts(path, count)


@pytest.mark.full
@pytest.mark.parametrize("path", packed.PARTS)
def test_a_record_of_parts_without_content(path: tuple[int, ...], folder: Path) -> None:
    model = onnx.load(folder / "step.onnx")
    record = next(entry for entry in model.metadata_props if entry.key == "graphscale.original")
    record.value = base64.b64encode(zlib.compress(parts(path, 5_000_000), 9)).decode()
    onnx.save(model, folder / "bad.onnx")
    with limited(10, 2**29):
        refuse(folder, "strip", "bad.onnx", "-o", "out.onnx", words=["bad.onnx", "fields", "--max-nodes"])


@pytest.mark.parametrize("path", packed.PARTS)
def test_a_model_of_parts_without_content(path: tuple[int, ...], folder: Path) -> None:
    (folder / "bad.onnx").write_bytes(parts(path, 700_000))
    with limited():
        refuse(folder, "inspect", "bad.onnx", "--max-nodes", "100000", words=["bad.onnx", "--max-nodes"])


@pytest.mark.parametrize("path", [path for path in packed.PARTS if path != (7, 1, 1)])
def test_parts_are_counted_before_they_are_read(path: tuple[int, ...], folder: Path) -> None:
    (folder / "bad.onnx").write_bytes(parts(path, 2000))
    with (
        pytest.raises(gs.errors.ModelFileError, match=r"2[0-9]{3} .*the limit is 1000 .--max-nodes"),
        limiting(Limits(max_nodes=1000)),
    ):
        gs.inspect(folder / "bad.onnx")


def test_fields_are_counted_as_protobuf_reads_them() -> None:
    """Groups, which no model has, are passed over; what they hold is no damage."""
    functions = b"\xca\x01\x00" * 100
    inside = packed.field(7, b"\xff")
    for content in (b"\x1b" + inside + b"\x1c", b"\x3b\x23" + inside + b"\x24\x3c", b"\x38\x05\x19" + bytes(8)):
        with pytest.raises(gs.errors.ModelFileError, match="more than 99 fields"):
            model_size.parse_model(content + functions, "it", 99)
        assert len(model_size.parse_model(content + functions, "it", 102).functions) == 100
    assert len(model_size.parse_model(functions, "it", 100).functions) == 100


# --- checkpoints and arrays -------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(5000, 400_000), (1000, 4000, 1000), (20, 10**8)])
def test_a_checkpoint_whose_tensors_share_their_bytes(sizes: tuple[int, ...], folder: Path) -> None:
    (folder / "artifacts" / "checkpoint").write_bytes(packed.share(*sizes))
    with limited(10, 2**30):
        for words in (["scale", "artifacts", "-o", "outfolder"], ["fuse", "artifacts", "-o", "out.onnx"]):
            refuse(folder, *words, words=["artifacts/checkpoint", "share"])


def test_a_checkpoint_whose_tensors_share_nothing(folder: Path) -> None:
    (folder / "checkpoint").write_bytes(packed.share(1, 400))
    assert read_checkpoint(folder / "checkpoint").trainable["p0"].size == 100


@pytest.mark.full
def test_arrays_that_shrink_more_than_others(tmp_path: Path) -> None:
    """Zeros shrink a thousand times, and commands take several times their size."""
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros(2**24, np.float32))
    with limiting(Limits(max_bytes=2**29)), pytest.raises(ModelFileError, match=r"--max-bytes \d+") as caught:
        read_npz(path)
    (hint,) = re.findall(r"--max-bytes (\d+)", str(caught.value))
    with limiting(Limits(max_bytes=int(hint))):
        assert read_npz(path)["x"].size == 2**24


@pytest.mark.parametrize("element", [[("a", ">f4", (0,))], [("a", ">f4", (2,))], "<U0", "|S0", "|V0"])
@pytest.mark.parametrize("count", [2**60, 1])
def test_arrays_whose_elements_are_no_numbers(element: Any, count: int, folder: Path) -> None:
    with zipfile.ZipFile(folder / "bomb.npz", "w") as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": element, "fortran_order": False, "shape": (count,)})
        file.write(bytes(8))
    for words in (["train", "step.onnx", "--data"], ["inspect", "original.onnx", "--check-gradients", "--feeds"]):
        outcome = processes.run([*words, "bomb.npz"], folder)
        assert outcome.code == 2 and b"bomb.npz: 'x'" in outcome.err
        assert processes.find_fault(words, outcome) is None
