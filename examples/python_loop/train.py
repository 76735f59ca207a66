"""Train a scaled step in a loop on ONNX Runtime alone: python train.py FOLDER [STATE.npz]."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

folder = Path(sys.argv[1])
images = np.fromfile(folder / "images.bin", np.float32).reshape(-1, 64, 64)
labels = np.fromfile(folder / "labels.bin", np.int64).reshape(-1, 64)
rate = np.array(0.005, np.float32)
batches = [{"images": x, "labels": y, "learning_rate": rate} for x, y in zip(images, labels, strict=True)]

# The loop.
options = ort.SessionOptions()
options.log_severity_level = 3  # errors: ONNX Runtime warns of each input with an initializer
session = ort.InferenceSession(folder / "step.onnx", options, providers=["CPUExecutionProvider"])
metadata = session.get_modelmeta().custom_metadata_map
pairs = json.loads(metadata["graphscale.state"])  # {input: output}, the loss scale among them
scale = json.loads(metadata["graphscale.names"])["loss_scale"]
outputs = [output.name for output in session.get_outputs()]
carried = dict(np.load(sys.argv[2] if len(sys.argv) > 2 else folder / "start.npz"))
for number, batch in enumerate(batches, 1):
    results = dict(zip(outputs, session.run(outputs, batch | carried), strict=True))
    carried = {name: results[output] for name, output in pairs.items()}
    if number % 10 == 0 or not results["all_finite"]:
        skipped = "" if results["all_finite"] else "  skipped"
        print(f"step {number}  loss {results['loss']:.6g}  loss scale {carried[scale]:g}{skipped}")
np.savez(folder / "state.npz", **carried)
