"""Prepare the files that the page trains from: the scaled step, its state, the digits, and ONNX Runtime's library.

    pip install -e '.[ort]' scikit-learn
    npm install --ignore-scripts --prefix examples/browser
    python examples/browser/prepare.py
    python -m http.server --directory examples/browser/site

JavaScript hosts can neither read the metadata of a model nor feed inputs that have an initializer: the initializers of
the state become a file of first values, and the metadata a JSON file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import onnx

import graphscale as gs
from graphscale.demo.digits import initial_state, read_step, split

HERE = Path(__file__).resolve().parent
PAGE = ("index.html", "style.css", "main.js", "training.js", "chart.js", "digits.js")
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
POLICY = gs.DynamicLossScale(2**10, increment_period=40)
BATCH, LEARNING_RATE, SEED = 64, 0.005, 1


def prepare(site: Path, runtime: Path) -> None:
    """Write the whole site into a folder; `runtime` is the folder dist/ of onnxruntime-web."""
    site.mkdir(parents=True, exist_ok=True)
    for source in [*(HERE / name for name in PAGE), *(runtime / name for name in RUNTIME)]:
        shutil.copy(source, site)
    rng = np.random.default_rng(SEED)
    train, held_out = split(rng)
    step = gs.scale(onnx.ModelProto.FromString(read_step("digits_step")), POLICY).model
    first = detach_state(step) | initial_state(rng)
    onnx.save(step, site / "step.onnx")
    tensors = {f"state/{name}": value for name, value in first.items()}
    for part, digits in (("train", train), ("test", held_out)):
        tensors[f"{part}/images"] = (digits["images"] * 16).astype(np.uint8)
        tensors[f"{part}/labels"] = digits["labels"].astype(np.uint8)
    description = {
        "pairs": pairs(step),
        "batch": BATCH,
        "learningRate": LEARNING_RATE,
        "tensors": write_tensors(site / "tensors.bin", tensors),
    }
    (site / "step.json").write_text(json.dumps(description, indent=1), encoding="utf-8")


def pairs(step: onnx.ModelProto) -> dict[str, str]:
    """Return the output with the next value of each carried input, as the metadata gives them."""
    (text,) = (entry.value for entry in step.metadata_props if entry.key == "graphscale.state")
    return json.loads(text)


def detach_state(step: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Remove the initializers of carried inputs from a step, and return their values."""
    carried = pairs(step)
    first = {t.name: onnx.numpy_helper.to_array(t) for t in step.graph.initializer if t.name in carried}
    kept = [tensor for tensor in step.graph.initializer if tensor.name not in first]
    del step.graph.initializer[:]
    step.graph.initializer.extend(kept)
    return first


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> list[dict[str, object]]:
    """Write tensors, each at a multiple of 8 bytes; return their names, types, dims and offsets."""
    rows, data = [], b""
    for name, value in tensors.items():
        rows.append({"name": name, "type": str(value.dtype), "dims": value.shape, "offset": len(data)})
        data += value.tobytes() + bytes(-value.nbytes % 8)
    path.write_bytes(data)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=HERE / "site")
    parser.add_argument("--runtime", type=Path, default=HERE / "node_modules" / "onnxruntime-web" / "dist")
    arguments = parser.parse_args()
    prepare(arguments.site, arguments.runtime)
    print(f"{arguments.site}: the page; serve it: python -m http.server --directory {arguments.site}")
