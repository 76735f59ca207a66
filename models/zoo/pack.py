"""Pack the smallest step of each open kind into one file: `python -m models.zoo.pack FOLDER ...`, writes steps.zip.

The steps have their truth beside them, and no values: they are for tests of roles, which run nothing.
"""

import argparse
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

from models.zoo.steps import is_aside

PACKED = Path(__file__).with_name("steps.zip")
# All steps of the kinds `fresh-*`, whose authors did not know the analysis.
FRESH = Path(__file__).with_name("fresh.zip")
# Steps as libraries' examples and tutorials have them, by an author who did not know the analysis either.
EXAMPLES = Path(__file__).with_name("examples.zip")
# Steps for an attack on the analysis, by an author who did not know it; the truth says which kinds are `aside`.
UNSEEN = Path(__file__).with_name("unseen.zip")
# Steps for a second such judgement, from other makers; the same fields.
LATER = Path(__file__).with_name("later.zip")
# Larger ones, compressed, are left out; bytes.
LARGEST = 10_000


def choose(folders: list[Path]) -> list[Path]:
    """Return the step of each open kind of the folders that is the smallest when compressed, by name."""
    best: dict[str, tuple[int, Path]] = {}
    for path in sorted(path for folder in folders for path in (folder / "open").glob("*.onnx")):
        kind = path.name.partition(".")[0]
        size = len(zlib.compress(path.read_bytes()))
        if not is_aside(kind) and size <= min(LARGEST, best.get(kind, (LARGEST,))[0]):
            best[kind] = size, path
    return sorted((path for _, path in best.values()), key=lambda path: path.name)


def write(paths: list[Path], packed: Path = PACKED) -> None:
    """Write steps with their truth; the same steps give the same bytes."""
    with zipfile.ZipFile(packed, "w") as archive:
        for path in paths:
            for file in (path, path.with_suffix(".json")):
                entry = zipfile.ZipInfo(file.name)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes(), compresslevel=9)


def names(packed: Path = PACKED) -> list[str]:
    """Return the names of the packed steps."""
    with zipfile.ZipFile(packed) as archive:
        return [name.removesuffix(".onnx") for name in archive.namelist() if name.endswith(".onnx")]


def read(name: str, packed: Path = PACKED) -> tuple[bytes, dict[str, Any]]:
    """Return a packed step, an ONNX file, and its truth."""
    with zipfile.ZipFile(packed) as archive:
        return archive.read(f"{name}.onnx"), json.loads(archive.read(f"{name}.json"))


def main() -> None:
    """Pack the steps of folders that `models.zoo.export` wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    chosen = choose(parser.parse_args().folders)
    write(chosen)
    print(f"{len(chosen)} steps, {PACKED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
