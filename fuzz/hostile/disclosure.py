"""Ways to make a file outside of a model's folder part of an output: nothing of it is read, and the command says so."""

from __future__ import annotations

import base64
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from fuzz.hostile import bench
from fuzz.hostile.processes import Outcome, contents, find_fault, run
from fuzz.hostile.runner import Category

_MARK = 24  # bytes
_SIZE = 4800  # of the secret
_FOLDERS = ("artifacts", "scaled")


class _Place:
    """A folder `work` with the files of the bench, and one beside it with a secret."""

    def __init__(self, folder: Path, choices: random.Random) -> None:
        self.work, self.secret, self.choices = folder / "work", folder / "secret", choices
        self.mark = bytes(choices.choice(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(_MARK))
        self.work.mkdir()
        self.secret.mkdir()
        (self.secret / "key").write_bytes(self.mark * (_SIZE // _MARK))
        bench.fill(self.work)
        self.call, name = choices.choice(bench.calls_on(".onnx"))
        self.words, self.path = bench.words_of(self.call), self.work / name
        self.model = onnx.load(self.path)
        if choices.random() < 0.2:  # the model itself is behind a link, from which its folder follows
            (self.path.parent / "real").mkdir()
            self.path = Path(shutil.move(self.path, self.path.parent / "real"))
            (self.path.parent.parent / self.path.name).symlink_to(f"real/{self.path.name}")

    def run(self, *codes: int) -> str | None:
        """Write the model, run the command; return how something of the secret got out, or the promise was broken."""
        self.path.write_bytes(self.model.SerializeToString())
        before = contents(self.work)
        outcome = run(self.words, self.work)
        fault = find_fault(self.words, outcome, codes or None) or self.find_mark(outcome)
        if fault is None and outcome.code == 2 and contents(self.work) != before:
            fault = "refused, and yet something was written"
        return fault and f"graphscale {' '.join(self.words)}: {fault}"

    def find_mark(self, outcome: Outcome) -> str | None:
        """Return where something of the secret is: in bytes, packed, or as numbers."""
        numbers = [f"{number:.5g}".encode() for number in struct.unpack("<6f", self.mark)]
        for name, text in (("stdout", outcome.out), ("stderr", outcome.err)):
            if self._holds(text) or any(number in text for number in numbers):
                return f"the secret is on {name}"
        for file in self.work.rglob("*"):
            if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1:
                if self._holds(file.read_bytes()) or (file.suffix == ".onnx" and self._holds(_record(file))):
                    return f"the secret is in {file.name}"
        return None

    def _holds(self, data: bytes) -> bool:
        return self.mark in data or base64.b64encode(self.mark) in data

    def location(self) -> str:
        """Return a name for the secret, and make the links that it needs."""
        folder, up = self.path.parent, os.path.relpath(self.secret, self.path.parent)
        (folder / "inner").mkdir(exist_ok=True)
        links = {"link": f"{up}/key", "chain": "link", "folder": up, "inner/link": f"../{up}/key", "root": "/"}
        for name, target in links.items():
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(target)
        if not (folder / "second").exists():
            (folder / "second").hardlink_to(self.secret / "key")
        absolute = str(self.secret / "key")
        return self.choices.choice(
            (
                *(absolute, f"/{absolute}", f"//{absolute}", f"/proc/self/root{absolute}", f"root{absolute}"),
                *(f"{up}/key", f"./{up}/key", f"inner/../{up}/key", f".//{up}//key", f"{up}/../secret/key"),
                *(f"inner/../inner/../{up}/key", "folder/../secret/key", "folder/key", "folder/./key", "folder//key"),
                *("link", "./link", "chain", "inner/link", "second", "inner/../link", "link/", f"{up}/key/", f"{up}/"),
                *(
                    f"{up}/key\0",
                    f"inner\0/../{up}/key",
                    "link\0.bin",
                    "\0",
                    "",
                    ".",
                    "..",
                    "/",
                    "./",
                    "inner",
                    "inner/",
                ),
                *(f"{up.upper()}/KEY", f"{up}/KEY", "LINK", f"file://{absolute}", f"~/../..{absolute}", "$PWD/link"),
                *(f"{up}/key".replace("/", "\\"), f"{up}/key".replace(".", "%2e"), f"{up}/key".replace(".", "\uff0e")),
                *(
                    f"{up}/key".replace("/", "\u2215"),
                    f"{up}/key".replace(".", "\u2024"),
                    f" {up}/key",
                    f"{up}/key ",
                    f"{up}/key\n",
                ),
                *(f"/proc/self/cwd/{os.path.relpath(self.secret, self.work)}/key", f"/dev/fd/../..{absolute}"),
                *("folder\u200b/key", "li\u0301nk", "x" * 5000, f"{'inner/../' * 200}{up}/key", f"{'./' * 2000}link"),
            )
        )

    def outside(self, name: str = "stolen") -> onnx.TensorProto:
        """Return a tensor whose content is the secret."""
        tensor = TensorProto(name=name, data_location=TensorProto.EXTERNAL)
        self.point(tensor, self.choices.choice(([6], [2, 3], [_SIZE // 4], [], [1])))
        return tensor

    def point(self, tensor: onnx.TensorProto, dims: list[int]) -> None:
        """Let the content of a tensor be the secret."""
        tensor.data_type = self.choices.choice((1, 1, 1, 6, 7, 2, 11, 10))
        tensor.dims[:] = dims
        location = self.location()
        tensor.external_data.add(key="location", value=location)
        if self.choices.random() < 0.4:
            tensor.external_data.add(key="offset", value=str(self.choices.choice((0, 4, 24))))
        if self.choices.random() < 0.3:
            size = {6: 4, 7: 8, 2: 1, 11: 8, 10: 2}.get(tensor.data_type, 4)
            length = size
            for dim in dims:
                length *= dim
            tensor.external_data.add(key="length", value=str(length))
        if self.choices.random() < 0.1:
            tensor.external_data.add(key="basepath", value=str(self.secret))


def _record(file: Path) -> bytes:
    """Return the original that a model holds, as far as it can be unpacked."""
    for item in onnx.ModelProto.FromString(file.read_bytes()).metadata_props:
        if item.key == "graphscale.original":
            return zlib.decompress(base64.b64decode(item.value))
    return b""


def initializers(folder: Path, choices: random.Random) -> str | None:
    """Take the content of an initializer from outside: of an existing or of another one."""
    place = _Place(folder, choices)
    graph = place.model.graph
    chosen = choices.choice([None, *graph.initializer])
    if chosen is None:
        graph.initializer.append(place.outside())
    else:
        stolen = TensorProto(name=chosen.name, data_location=TensorProto.EXTERNAL)
        place.point(stolen, [*chosen.dims])
        chosen.CopyFrom(stolen)
    return place.run(2)


def _use(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Add a node whose output is one of the graph."""
    model.graph.node.insert(0, node)
    model.graph.output.append(helper.make_tensor_value_info(node.output[0], 1, None))


def attributes(folder: Path, choices: random.Random) -> str | None:
    """Take the value of a Constant, or of another attribute, from outside."""
    place = _Place(folder, choices)
    node = onnx.NodeProto(op_type="Constant", output=["stolen"])
    kind = choices.randrange(4)
    attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=place.outside())
    if kind == 1:
        node.op_type, attribute.name = "ConstantOfShape", "value"
        place.model.graph.initializer.append(helper.make_tensor("size", TensorProto.INT64, [1], [6]))
        node.input.append("size")
    elif kind == 2:
        node.op_type, node.domain, attribute.name = "Held", "custom", "tensors"
        place.model.opset_import.add(domain="custom", version=1)
        attribute.type = onnx.AttributeProto.TENSORS
        attribute.ClearField("t")
        attribute.tensors.extend([place.outside("a"), place.outside("b")])
    elif kind == 3:
        attribute.name, attribute.type = "sparse_value", onnx.AttributeProto.SPARSE_TENSOR
        attribute.ClearField("t")
        attribute.sparse_tensor.CopyFrom(_sparse(place))
    _use(place.model, node)
    return place.run(2)


def _sparse(place: _Place) -> onnx.SparseTensorProto:
    values, indices = place.outside(), helper.make_tensor("at", TensorProto.INT64, [6], range(6))
    values.dims[:] = [6]
    if place.choices.random() < 0.3:
        indices, values = place.outside("at"), helper.make_tensor("stolen", TensorProto.FLOAT, [6], [1.0] * 6)
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[99])


def sparse(folder: Path, choices: random.Random) -> str | None:
    """Take a sparse initializer from outside, of the graph or of a body."""
    place = _Place(folder, choices)
    graph = place.model.graph
    if choices.random() < 0.4:
        graph = _body(place.model)
    graph.sparse_initializer.append(_sparse(place))
    return place.run(2)


def _body(model: onnx.ModelProto) -> onnx.GraphProto:
    """Add an If to a model; return one of its branches."""
    ends = [helper.make_tensor_value_info("inside", 1, None)]
    branch = helper.make_graph([helper.make_node("Constant", [], ["inside"], value_float=1.0)], "branch", [], ends)
    model.graph.initializer.append(helper.make_tensor("condition", TensorProto.BOOL, [], [True]))
    node = helper.make_node("If", ["condition"], ["chosen"], then_branch=branch, else_branch=branch)
    _use(model, node)
    return next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")


def bodies(folder: Path, choices: random.Random) -> str | None:
    """Take an initializer or a constant of a branch, of a branch in it, or of a function's from outside."""
    place = _Place(folder, choices)
    body = _body(place.model)
    if choices.random() < 0.3:
        inner = onnx.ModelProto()
        inner.graph.name = "inner"
        within = _body(inner)
        _steal(within, place)
        body.node.insert(0, inner.graph.node[0])
        place.model.graph.initializer.extend(inner.graph.initializer)
        del place.model.graph.initializer[-2:-1]
    else:
        _steal(body, place)
    return place.run(2)


def _steal(body: onnx.GraphProto, place: _Place) -> None:
    if place.choices.random() < 0.5:
        body.initializer.append(place.outside())
        body.node.add(op_type="Identity", input=["stolen"], output=["got"])
    else:
        node = body.node.add(op_type="Constant", output=["got"])
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=place.outside())
    body.node[0].CopyFrom(helper.make_node("Identity", ["got"], ["inside"]))
    body.node.insert(0, body.node.pop())


def functions(folder: Path, choices: random.Random) -> str | None:
    """Take a constant of a function from outside: one that is called, or not."""
    place = _Place(folder, choices)
    model = place.model
    node = onnx.NodeProto(op_type="Constant", output=["b"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=place.outside())
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("thief", "Steal", [], ["b"], [node], imports))
    model.opset_import.add(domain="thief", version=1)
    if choices.random() < 0.7:
        _use(model, helper.make_node("Steal", [], ["stolen"], domain="thief"))
    return place.run(2)


def training_infos(folder: Path, choices: random.Random) -> str | None:
    """Take a tensor of `training_info` from outside."""
    place = _Place(folder, choices)
    info = place.model.training_info.add()
    graph = choices.choice((info.initialization, info.algorithm))
    graph.name = "more"
    graph.initializer.append(place.outside())
    graph.node.add(op_type="Identity", input=["stolen"], output=["got"])
    return place.run()  # it may be left out, unread


def records(folder: Path, choices: random.Random) -> str | None:
    """Forge the original that `strip` restores: its tensors name files."""
    place = _Place(folder, choices)
    if choices.random() < 0.6:
        place.call, name = choices.choice((("strip", "step.onnx"), ("strip FOLDER", "scaled/training_model.onnx")))
        place.words, place.path = bench.words_of(place.call), place.work / name
        place.path.unlink()  # it may be a link
        place.model = onnx.load(bench.make_bench() / name)
    record = next((item for item in place.model.metadata_props if item.key == "graphscale.original"), None)
    if record is None:
        record = place.model.metadata_props.add(key="graphscale.original", value="")
        original = onnx.ModelProto()
        original.CopyFrom(place.model)
    else:
        original = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(record.value)))
    kind = choices.randrange(4)
    if kind == 0 or not original.graph.initializer:
        original.graph.initializer.append(place.outside())
    elif kind == 1:
        chosen = choices.choice(original.graph.initializer)
        stolen = TensorProto(name=chosen.name, data_location=TensorProto.EXTERNAL)
        place.point(stolen, [*chosen.dims])
        chosen.CopyFrom(stolen)
    elif kind == 2:
        node = onnx.NodeProto(op_type="Constant", output=["stolen"])
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=place.outside())
        _use(original, node)
    else:
        _steal(_body(original), place)
    record.value = base64.b64encode(zlib.compress(original.SerializeToString())).decode()
    return place.run(*((2,) if place.call == "strip" else ()))


def links_in_folders(folder: Path, choices: random.Random) -> str | None:
    """Put links that lead outside into a folder of artifacts, which is copied."""
    place = _Place(folder, choices)
    name, calls = choices.choice(
        (
            ("artifacts", ("scale FOLDER", "autocast FOLDER", "fuse", "export-weights CHECKPOINT")),
            ("scaled", ("strip FOLDER",)),
        )
    )
    place.words = bench.words_of(choices.choice(calls))
    inside = place.work / name
    target = choices.choice(("../../secret/key", str(place.secret / "key"), "../../secret", "chain"))
    if target == "chain":
        (inside / "chain").symlink_to("../../secret/key")
    link = inside / choices.choice(
        ("notes.txt", "checkpoint", "sample.npz", "eval_model.onnx", "sub", "optimizer_model.onnx")
    )
    if link.is_symlink() or link.exists():
        link.unlink()
    link.symlink_to(target)
    return place.run()


def permitted(folder: Path, choices: random.Random) -> str | None:
    """Take content from the model's folder, or from a root that is named: it is read, and the mark is found."""
    place = _Place(folder, choices)
    place.words, place.path = ["scale", "original.onnx", "-o", "inner/out.onnx"], place.work / "original.onnx"
    (place.work / "inner").mkdir()
    place.path.unlink()
    place.model = onnx.load(bench.make_bench() / "original.onnx")
    location = choices.choice(("key", "./key", "inner/key"))
    if choices.random() < 0.5:
        (place.work / location).write_bytes((place.secret / "key").read_bytes())
    else:
        location = "../secret/key"
        place.words.append("--external-data-root=../secret")
    tensor = place.model.graph.initializer.add(name="more", data_type=1, dims=[_SIZE // 4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    place.path.write_bytes(place.model.SerializeToString())
    outcome = run(place.words, place.work)
    fault = find_fault(place.words, outcome, (0,))
    if fault is None and not place._holds((place.work / "inner" / "out.onnx.data").read_bytes()):
        fault = "the content was not copied"
    return fault and f"graphscale {' '.join(place.words)}, {location}: {fault}"


_KINDS: dict[str, Callable[[Path, random.Random], str | None]] = {
    "initializers": initializers,
    "attributes": attributes,
    "bodies": bodies,
    "functions": functions,
    "sparse initializers": sparse,
    "training_info": training_infos,
    "records of originals": records,
    "links in folders": links_in_folders,
    "permitted": permitted,
}
CATEGORY = Category(
    "disclosure", "nothing outside of the model's folder is read, written or printed; the command says so", _KINDS
)
