"""Hostile texts in every file, path and option: none reaches the terminal as anything but characters that it shows."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from pathlib import Path

import onnx
import typer

from fuzz.hostile import bench
from fuzz.hostile.processes import Outcome, hold
from fuzz.hostile.runner import Category
from fuzz.hostile.state_files import _File
from fuzz.hostile.texts import INJECTED, hostile, spoil_json, spoil_model
from graphscale.cli import make_command


def held(words: list[str], folder: Path) -> str | None:
    """As `hold`, and no text begins a line of its own."""
    return hold(words, folder, more=_injected)


def _injected(outcome: Outcome) -> str | None:
    for line in (*outcome.out.splitlines(), *outcome.err.splitlines()):
        if line.startswith(INJECTED.encode()):
            return f"a line break of a text: {line[:80]!a}"
    return None


def names_in_models(folder: Path, choices: random.Random) -> str | None:
    """Spoil the texts of a model: names, operators, domains, axes, metadata, doc strings."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    spoil_model(model, choices)
    path.write_bytes(model.SerializeToString())
    return held(words, folder)


def external_locations(folder: Path, choices: random.Random) -> str | None:
    """Name a hostile file for the content of a tensor."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    tensor = choices.choice(model.graph.initializer or [model.graph.initializer.add(name="w", data_type=1)])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key in ("location", choices.choice(("offset", "length", "checksum", hostile(choices)))):
        tensor.external_data.add(key=key, value=hostile(choices))
    path.write_bytes(model.SerializeToString())
    return held(words, folder)


def metadata(folder: Path, choices: random.Random) -> str | None:
    """Spoil texts in graphscale's own metadata."""
    words, path = bench.choose(choices, folder, ".onnx")
    model = onnx.load(path)
    own = [item for item in model.metadata_props if item.key.startswith("graphscale.")]
    for item in own or [model.metadata_props.add(key="graphscale.roles", value='{"loss": "loss"}')]:
        if choices.random() < 0.5:
            continue
        try:
            item.value = json.dumps(spoil_json(json.loads(item.value), lambda: hostile(choices), choices))
        except ValueError:
            item.value = hostile(choices)
    path.write_bytes(model.SerializeToString())
    return held(words, folder)


def members(folder: Path, choices: random.Random) -> str | None:
    """Give members of an .npz file hostile names."""
    words, path = bench.choose(choices, folder, ".npz")
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            spoiled = hostile(choices) + name if choices.random() < 0.5 else name
            archive.writestr(zipfile.ZipInfo(spoiled), data if choices.random() < 0.9 else data[:20])
    return held(words, folder)


def json_files(folder: Path, choices: random.Random) -> str | None:
    """Spoil texts in JSON files and metrics."""
    words, path = bench.choose(choices, folder, ".json", ".jsonl", ".csv")
    lines = path.read_text().splitlines()
    if path.suffix == ".json":
        lines = [json.dumps(spoil_json(json.loads("\n".join(lines)), lambda: hostile(choices), choices))]
    elif path.suffix == ".jsonl":
        lines = [json.dumps(spoil_json(json.loads(line), lambda: hostile(choices), choices)) for line in lines]
    else:
        cells = lines[0].split(",")
        cells[choices.randrange(len(cells))] += '"' + hostile(choices).replace('"', '""') + '"'
        lines[choices.randrange(len(lines))] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return held(words, folder)


def state_files(folder: Path, choices: random.Random) -> str | None:
    """Give arrays of a state file or checkpoint hostile names, or its metadata hostile texts; the checksum fits."""
    words, path = bench.choose(choices, folder, ".safetensors")
    file = _File.parse(path.read_bytes())
    for name in choices.sample([*file.entries], choices.randrange(len(file.entries) + 1)):
        file = file.renamed(name, hostile(choices) + name)
    for key in choices.sample([*file.metadata], choices.randrange(len(file.metadata) + 1)):
        file = file.with_metadata(**{key: choices.choice((hostile(choices), file.metadata[key] + hostile(choices)))})
    path.write_bytes(file.pack())
    return held(words, folder)


def checkpoints(folder: Path, choices: random.Random) -> str | None:
    """Overwrite names in a checkpoint of ONNX Runtime by texts of the same length."""
    words, path = bench.choose(choices, folder, "checkpoint")
    data = path.read_bytes()
    for name in choices.sample((b"fc1.weight", b"fc1.bias", b"fc2.weight", b"fc2.bias"), 2):
        text = hostile(choices).encode()[: len(name)].ljust(len(name), b"\x1b")
        data = data.replace(name, text)
    path.write_bytes(data)
    return held(words, folder)


def paths(folder: Path, choices: random.Random) -> str | None:
    """Give a file that is read, written or missing, or the folder around it, a hostile name."""
    bench.fill(folder)
    words = bench.words_of(choices.choice([*bench.CALLS]))
    named = [at for at, word in enumerate(words) if at and (word.startswith("out") or (folder / word).exists())]
    for at in choices.sample(named, choices.randrange(1, len(named) + 1)):
        before = Path(words[at])
        after = Path(f"{hostile(choices, path=True)}{choices.choice((before.name, before.suffix))}")
        if choices.random() < 0.4:
            after = Path(hostile(choices, path=True), after)
            (folder / after.parent).mkdir(exist_ok=True)
        if (folder / before).exists() and choices.random() < 0.8:
            shutil.move(folder / before, folder / after)
        words[at] = str(after)
    return held(words, folder)


def options(folder: Path, choices: random.Random) -> str | None:
    """Give a hostile value to an option, or a hostile option or command."""
    bench.fill(folder)
    words = bench.words_of(choices.choice([*bench.CALLS]))
    parameters = make_command(words[0]).params
    taking = [each.opts[-1] for each in parameters if isinstance(each, typer.core.TyperOption) and not each.is_flag]
    text = hostile(choices).replace("\0", "")
    if choices.random() < 0.9:
        words.append(f"{choices.choice(taking)}={choices.choice((text, f'a={text}', f'{text}=1', f'{text}.json'))}")
    else:
        words[choices.randrange(len(words))] = choices.choice((text, f"--{text}"))
    return held(words, folder)


CATEGORY = Category(
    "terminal",
    "no control, bidirectional or invisible character, and no line break, of any file, path or option is printed",
    {
        "names in models": names_in_models,
        "paths": paths,
        "metadata": metadata,
        "options": options,
        "members of npz": members,
        "JSON files": json_files,
        "state files": state_files,
        "checkpoints": checkpoints,
        "external locations": external_locations,
    },
)
