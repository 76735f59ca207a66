"""Prepare the files that the hosts in Python, C++ and Node train from.

    pip install -e '.[ort]' scikit-learn
    python -m examples.prepare files

- `step.onnx`: the demo's step on digits, scaled. Weights and momentum are inputs without an initializer.
- `start.npz`, and `start/NAME.bin` for each array in it: first values of these, as raw bytes of float32.
- `images.bin`, `labels.bin`: 100 batches of 64 digits, float32 [100, 64, 64] and int64 [100, 64]. One pixel of step 57
  is infinite.
- `host.onnx`, `host.json`: the step for JavaScript, without initializers of carried inputs; their values, and the pairs
  of carried inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnx

import graphscale as gs
from examples.browser.prepare import BATCH, POLICY, SEED, detach_state, pairs
from graphscale.demo.digits import initial_state, read_step, split

STEPS, OVERFLOW = 100, 57


def prepare(folder: Path, target: str = "onnx") -> None:
    """Write the files into a folder."""
    (folder / "start").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    digits, _ = split(rng)
    step = gs.scale(onnx.ModelProto.FromString(read_step("digits_step")), POLICY, target=target).model
    onnx.save(step, folder / "step.onnx")
    weights = initial_state(rng)
    np.savez(folder / "start.npz", **weights)
    for name, value in weights.items():
        value.tofile(folder / "start" / f"{name}.bin")
    chosen = np.arange(STEPS * BATCH) % len(digits["labels"])
    images = digits["images"][chosen].reshape(STEPS, BATCH, -1)
    images[OVERFLOW - 1, 0, 27] = np.inf
    images.tofile(folder / "images.bin")
    digits["labels"][chosen].tofile(folder / "labels.bin")
    first = {
        name: {"type": str(value.dtype), "dims": value.shape, "data": value.flatten().tolist()}
        for name, value in detach_state(step).items()
    }
    onnx.save(step, folder / "host.onnx")
    (folder / "host.json").write_text(json.dumps({"state": pairs(step), "first": first}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="onnx", choices=["onnx", "ort-cpu"])
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.target)
    print(f"{arguments.folder}: the scaled step, its first weights, and {STEPS} batches of {BATCH} digits")
