"""Small files that grow, and files that never end: refused in 10 s of CPU time and 2 GiB of memory, without waiting."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from fuzz.hostile import bench, growth, packed
from fuzz.hostile.packed import field
from fuzz.hostile.processes import hold
from fuzz.hostile.runner import Category
from fuzz.hostile.state_files import _File
from tests.cli.bad_graphs import sgd

_CPU_OF_LARGE = 60  # seconds of CPU time for files of megabytes: they are large, and need not grow


# --- files that are none ----------------------------------------------------------------------------------------------


def devices(folder: Path, choices: random.Random) -> str | None:
    """Give a device, a pipe, a socket or an endless file as any file of any command, those in folders among them."""
    bench.fill(folder)
    call = choices.choice([*bench.CALLS])
    words = bench.words_of(call)
    named = [word for word in words[1:] if word.startswith("out") and word not in ("outfolder", "outkept")]
    path = folder / choices.choice((*bench.inputs_of(call), *bench.inputs_of(call), *named)).rpartition("=")[2]
    path.unlink(missing_ok=True)
    kind = choices.choice(("zero", "fifo", "link to a fifo", "socket", "endless", "random", "full", "folder", "loop"))
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link to a fifo":
            os.mkfifo(folder / "pipe")
            path.symlink_to(folder / "pipe")
        case "socket":
            _bind(path)
        case "endless":
            with path.open("wb") as file:
                file.truncate(choices.choice((2**36, 2**40, 2**42)))
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case _:
            path.symlink_to(f"/dev/{kind}")
    # A link that leads to itself is nothing that is lost.
    fault = hold(words, folder, codes=(0, 1, 2) if path.name in named and kind == "loop" else (2,))
    return fault and f"{path.name} is {kind}: {fault}"


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, tempfile.TemporaryDirectory() as short:
        made.bind(f"{short}/s")
        shutil.move(f"{short}/s", path)


def external_devices(folder: Path, choices: random.Random) -> str | None:
    """Keep the content of a tensor in a device or a pipe."""
    words, path = bench.choose(choices, folder, "original.onnx", "step.onnx", "fused.onnx", "_model.onnx")
    model = onnx.load(path)
    tensor = model.graph.initializer.add(name="more", data_type=1, dims=[choices.choice((1, 2**20, 2**40))])
    tensor.data_location = TensorProto.EXTERNAL
    location = choices.choice(("pipe", "zero", "tty", "loop"))
    tensor.external_data.add(key="location", value=location)
    inside = path.parent / location
    if location == "pipe":
        os.mkfifo(inside)
    else:
        inside.symlink_to(f"/dev/{location}" if location != "loop" else "loop")
    path.write_bytes(model.SerializeToString())
    return hold(words, folder, codes=(2,))


# --- models -----------------------------------------------------------------------------------------------------------


def _write_over(choices: random.Random, folder: Path, model: onnx.ModelProto | bytes) -> list[str]:
    """Put a model in the place of one that a command reads."""
    words, path = bench.choose(choices, folder, ".onnx")
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return words


def functions(folder: Path, choices: random.Random) -> str | None:
    """Let functions call each other: every level calls the next one twice or more, or itself."""
    model = sgd()
    levels, calls = choices.choice(((24, 2), (24, 2), (60, 2), (16, 3), (8, 9), (4, 40), (5000, 1), (3, 400), (300, 1)))
    round_trip = choices.random() < 0.2
    wrapped = choices.random() < 0.2
    for level in range(levels):
        last = level == levels - 1
        body = []
        for call in range(calls):
            source = "a" if not call else f"t{call - 1}"
            target = "b" if call == calls - 1 else f"t{call}"
            if last and not round_trip:
                body.append(helper.make_node("Identity", [source], [target]))
                continue
            called = helper.make_node(f"f{0 if last else level + 1}", [source], [target], domain="bomb")
            body += _in_branch(called) if wrapped else [called]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("bomb", 1)]
        model.functions.append(helper.make_function("bomb", f"f{level}", ["a"], ["b"], body, imports))
    model.opset_import.add(domain="bomb", version=1)
    node = model.graph.node.add(op_type="f0", domain="bomb", input=[model.graph.input[0].name], output=["bombed"])
    if choices.random() < 0.5:  # within the step
        reader = next(each for each in model.graph.node if model.graph.input[0].name in each.input)
        reader.input[0] = "bombed" if reader.input[0] == model.graph.input[0].name else reader.input[0]
        model.graph.node.remove(node)
        model.graph.node.insert(0, node)
    fault = hold(_write_over(choices, folder, model), folder)
    return fault and f"{levels} levels of {calls} calls, in branches {wrapped}, circle {round_trip}: {fault}"


def _in_branch(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    (output,) = node.output
    node.output[0] = f"{output}.inner"
    ends = [helper.make_tensor_value_info(f"{output}.inner", 1, None)]
    other = helper.make_node("Identity", node.input, [f"{output}.inner"])
    branches = {
        f"{name}_branch": helper.make_graph([each], name, [], ends) for name, each in (("then", node), ("else", other))
    }
    true = helper.make_node(
        "Constant", [], [f"{output}.true"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True])
    )
    return [true, helper.make_node("If", [f"{output}.true"], [output], **branches)]


def nesting(folder: Path, choices: random.Random) -> str | None:
    """Nest If, Loop or Scan, up to thousands deep: more than a protocol buffer library writes, so by hand."""
    depth = choices.choice((5, 20, 23, 24, 25, 30, 100, 1000, 1000, 5000))
    name = choices.choice((b"If", b"If", b"Loop", b"Scan", b"NoSuchOperator"))
    output = field(2, b"out") + field(4, b"Identity") + field(1, b"x")
    graph = field(1, output) + field(2, b"inner")
    for _ in range(depth):
        attributes = b"".join(
            field(5, field(1, label) + field(6, graph) + b"\xa0\x01\x05")
            for label in ((b"then_branch", b"else_branch")[: 2 if depth < 12 else 1] if name == b"If" else (b"body",))
        )
        node = field(1, b"condition") + field(2, b"out") + field(4, name) + attributes
        graph = field(1, node) + field(2, b"inner")
    words, path = bench.choose(choices, folder, ".onnx")
    # Protocol buffers that follow each other are merged: the nodes go into the graph of the model.
    path.write_bytes(path.read_bytes() + field(7, graph))
    fault = hold(words, folder)
    return fault and f"{name.decode()} {depth} deep: {fault}"


def repeated(folder: Path, choices: random.Random) -> str | None:
    """Write sums of sums, nested outputs of bodies, rounds of a Loop, equal names."""
    size, levels = choices.choice(((3, 14), (4, 8), (30, 4), (300, 1), (3000, 1)))
    width = min(size, 4)
    operator, read = choices.choice(("If", "Loop")), choices.choice(("x", "dw1"))
    model = choices.choice(
        (
            lambda: growth.all_zeros(levels, size),
            lambda: growth.nested_flow(operator, levels, width, read),
            lambda: growth.shift_register(size, levels, summed=choices.random() < 0.3),
            lambda: growth.equal_names(size * levels),
        )
    )()
    fault = hold(_write_over(choices, folder, model), folder)
    return fault and f"{size} in {levels} levels: {fault}"


def many(folder: Path, choices: random.Random) -> str | None:
    """Write hundreds of thousands of outputs, inputs, nodes, initializers, operands, entries; or texts of megabytes."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    kind = choices.randrange(10)
    graph, count = model.graph, choices.choice((30_000, 100_000, 300_000 if kind in (0, 6) else 50_000))
    source = (graph.input or graph.output)[0].name
    match kind:
        case 0 | 1:
            graph.output.extend(helper.make_tensor_value_info(f"o{i}", 1, [1]) for i in range(count))
            if kind:
                graph.node.extend(helper.make_node("Neg", [source], [f"o{i}"]) for i in range(count))
        case 2:
            graph.input.extend(helper.make_tensor_value_info(f"i{i}", 1, [1]) for i in range(count))
        case 3:
            names = [source, *(f"n{i}" for i in range(count))]
            graph.node.extend(helper.make_node("Neg", [a], [b]) for a, b in itertools.pairwise(names))
        case 4:
            graph.initializer.extend(helper.make_tensor(f"w{i}", 1, [1], [1.0]) for i in range(count))
        case 5:
            graph.node.add(op_type="Sum", input=[source] * count, output=["sum"])
        case 6:
            for i in range(count):
                model.metadata_props.add(key=f"k{i}", value="v")
        case 7:
            graph.name = model.doc_string = "x" * (count * 100)
            graph.node.add(op_type="Neg", input=[source], output=["y" * (count * 10)])
        case 8:
            graph.node.add(op_type="Split", input=[source], output=[f"s{i}" for i in range(count)])
        case _:
            graph.value_info.extend(helper.make_tensor_value_info(f"v{i}", 1, ["d"] * 3) for i in range(count))
    path.write_bytes(model.SerializeToString())
    fault = hold(words, folder, cpu=_CPU_OF_LARGE)
    return fault and f"kind {kind} of many, {count}: {fault}"


def parts(folder: Path, choices: random.Random) -> str | None:
    """Write millions of parts without content into a file of megabytes."""
    words, path = bench.choose(choices, folder, ".onnx")
    count = choices.choice((10**6, 5 * 10**6, 10**7))
    path.write_bytes(path.read_bytes() + packed.empty_parts(choices.choice(packed.PARTS), count))
    fault = hold(words, folder, cpu=_CPU_OF_LARGE)
    return fault and f"{count} parts: {fault}"


def shared(folder: Path, choices: random.Random) -> str | None:
    """Let the tensors of a checkpoint, or the states of an optimizer, share their bytes."""
    words, path = bench.choose(choices, folder, "checkpoint")
    arguments = choices.choice(((5000, 400_000), (1000, 4000, 3000), (20, 10**7)))
    path.write_bytes(packed.share(*arguments))
    fault = hold(words, folder)
    return fault and f"shared {arguments}: {fault}"


_HUGE = (2**31 - 1, 2**31, 2**33, 2**40, 2**62, 2**63 - 1, 3 * 10**9)


def dimensions(folder: Path, choices: random.Random) -> str | None:
    """Give values, constants and operators that make tensors dimensions of up to 2**62."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    size, graph = choices.choice(_HUGE), model.graph
    shape = [size] * choices.choice((1, 1, 2, 8))
    kind = choices.randrange(6)
    values = [*graph.input, *graph.output, *graph.value_info]
    match kind:
        case 0:
            for value in choices.sample(values, min(len(values), 3)):
                for dim in value.type.tensor_type.shape.dim:
                    dim.dim_value = size
        case 1:
            graph.initializer.add(name="more", data_type=choices.choice((1, 7, 10)), dims=shape)
        case 2:
            tensor = graph.initializer.add(name="more", data_type=1, dims=shape, data_location=TensorProto.EXTERNAL)
            tensor.external_data.add(key="location", value=choices.choice(("original.onnx", path.name)))
            tensor.external_data.add(key="length", value=str(size))
        case _:
            numbers = {"shape": shape, "zero": [0], "one": [1]}
            for name, given in numbers.items():
                graph.initializer.append(helper.make_tensor(f"bomb.{name}", TensorProto.INT64, [len(given)], given))
            operator = choices.choice(("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize", "OneHot"))
            operands = {
                "ConstantOfShape": ["bomb.shape"],
                "Expand": ["bomb.one", "bomb.shape"],
                "Tile": ["bomb.one", "bomb.shape"],
                "Range": ["bomb.zero", "bomb.shape", "bomb.one"],
                "Pad": ["bomb.one", "bomb.shape"],
                "Resize": ["bomb.one", "", "", "bomb.shape"],
                "OneHot": ["bomb.zero", "bomb.shape", "bomb.shape"],
            }
            node = helper.make_node(operator, operands[operator], ["bomb.made"])
            graph.node.insert(0, node)
            sink = helper.make_node("ReduceSum", ["bomb.made"], ["bomb.sum"], keepdims=0)
            graph.node.insert(1, sink)
            if kind == 3:
                graph.output.append(helper.make_tensor_value_info("bomb.sum", 1, []))
    path.write_bytes(model.SerializeToString())
    fault = hold(words, folder)
    return fault and f"kind {kind} of dimensions, {shape}: {fault}"


def texts(folder: Path, choices: random.Random) -> str | None:
    """Write JSON and rows of metrics of many megabytes, deep or long."""
    words, path = bench.choose(choices, folder, ".json", ".jsonl", ".csv")
    size = choices.choice((10**6, 10**7, 5 * 10**7))
    good = path.read_text()
    text = choices.choice(("[", '{"a":', "9", '"', "[0,", "\n", "{}\n", ",", "[[],", '"\\u0000"', good))
    path.write_text((good if choices.random() < 0.3 else "") + text * (size // len(text)))
    fault = hold(words, folder)
    return fault and f"{size} bytes of {text[:9]!r}: {fault}"


def headers(folder: Path, choices: random.Random) -> str | None:
    """Write state files whose headers are large, deep, or claim to be."""
    words, path = bench.choose(choices, folder, ".safetensors")
    file = _File.parse(path.read_bytes())
    size = choices.choice((10**6, 10**7))
    match choices.randrange(5):
        case 0:
            data = struct.pack("<Q", choices.choice((2**27, 2**40, 2**63, 2**64 - 1))) + file.pack()[8:]
        case 1:
            data = file.with_metadata(**{choices.choice([*file.metadata]): "[" * size}).pack()
        case 2:
            data = file.pack({f'"t{i}"': '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' for i in range(size // 50)})
        case 3:
            data = file.pack({'"more"': f'{{"dtype":"F32","shape":[{2**62},{2**62}],"data_offsets":[0,0]}}'})
        case _:
            data = file.with_metadata(**{f"k{i}": "v" for i in range(size // 50)}).pack()
    path.write_bytes(data)
    return hold(words, folder)


def state_options(folder: Path, choices: random.Random) -> str | None:
    """Ask for axes of gigabytes, runs and steps without end."""
    bench.fill(folder)
    size = choices.choice((2**31 - 1, 2**28, 2**62, 10**30))
    model = sgd()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == 8:
                dim.dim_param = "batch"
    (folder / "original.onnx").write_bytes(model.SerializeToString())
    call = choices.choice(
        (
            f"inspect original.onnx --check-gradients --dim batch={size}",
            f"verify original.onnx original.onnx --numeric --dim batch={size}",
            f"split step.onnx -o out.onnx out2.onnx --stages {size}",
            f"split step.onnx -o out.onnx out2.onnx --bucket-size {size}",
            f"train step.onnx --data data.npz --state state.npz --quiet --max-steps 1 --batch-size {size}",
            f"train step.onnx --data data.npz --state state.npz --quiet --max-steps 1 --keep-checkpoints {size}",
            f"scale original.onnx --dry-run --increment-period {size}",
            f"scale original.onnx --dry-run --max-nodes {size} --max-bytes {size}",
        )
    )
    return hold(call.split(), folder)


_KINDS: dict[str, Callable[[Path, random.Random], str | None]] = {
    "devices": devices,
    "functions": functions,
    "nesting": nesting,
    "repeated": repeated,
    "archives": packed.archives,
    "records": packed.records,
    "dimensions": dimensions,
    "many": many,
    "parts": parts,
    "shared": shared,
    "external devices": external_devices,
    "texts": texts,
    "headers": headers,
    "options": state_options,
}
CATEGORY = Category("bombs", "refused or done within 10 s of CPU time and 2 GiB of memory, without waiting", _KINDS)
