"""Give exported steps another form, without their frameworks.

    python -m models.zoo.reform FOLDER --style initializers --out OTHER

The steps of FOLDER/open whose states are inputs are written to OTHER/open, with their values and their truth.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnx_ir as ir

from models.zoo import styles
from models.zoo.steps import STYLES, Style, Truth


def reform(path: Path, style: Style, folder: Path) -> bool:
    """Write a step in the style's names, shapes and kind of states; return False where its states are no inputs."""
    truth = Truth(**json.loads(path.with_suffix(".json").read_text()))
    with np.load(path.with_suffix(".npz")) as values:
        feeds = dict(values)
    if not set(truth.states.values()) <= set(feeds):
        return False
    model = ir.load(path)
    truth, feeds = styles.apply(style, model, truth, feeds)
    written = folder / path.name
    ir.save(model, written)
    np.savez_compressed(written.with_suffix(".npz"), **{value.name: feeds[value.name] for value in model.graph.inputs})
    written.with_suffix(".json").write_text(truth.to_json())
    return True


def main() -> None:
    """Reform the open steps of a folder that `models.zoo.export` wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--style", choices=STYLES, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    chosen = parser.parse_args()
    folder = chosen.out / "open"
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted((chosen.folder / "open").glob("*.onnx"))
    print(sum(reform(path, STYLES[chosen.style], folder) for path in paths), "steps of", len(paths))


if __name__ == "__main__":
    main()
