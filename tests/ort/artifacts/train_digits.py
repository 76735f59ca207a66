"""A user's training script: train on handwritten digits with a folder of artifacts. It knows of no loss scale.

python train_digits.py FOLDER
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.training import api
from sklearn.datasets import load_digits

FOLDER = Path(sys.argv[1])
EPOCHS, ROWS, WINDOW, TRAINED = 10, 8, 2, 1437


def main() -> None:
    """Train with gradients accumulated over two batches, save and load after each epoch, then test."""
    digits = load_digits()
    rng, losses = np.random.default_rng(0), []
    shuffled = rng.permutation(len(digits.target))
    images, labels = (digits.data[shuffled] / 16).astype(np.float32), digits.target[shuffled].astype(np.int64)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = FOLDER / "checkpoint"
        for _ in range(EPOCHS):
            state = api.CheckpointState.load_checkpoint(checkpoint)
            module = api.Module(FOLDER / "training_model.onnx", state, FOLDER / "eval_model.onnx")
            optimizer = api.Optimizer(FOLDER / "optimizer_model.onnx", module)
            order = rng.permutation(TRAINED)[: TRAINED // (ROWS * WINDOW) * ROWS * WINDOW]
            module.train()
            for i, rows in enumerate(order.reshape(-1, ROWS), 1):
                losses.append(float(module(images[rows], labels[rows])))
                if i % WINDOW == 0:
                    optimizer.step()
                    module.lazy_reset_grad()
            checkpoint = Path(temporary, "checkpoint")
            api.CheckpointState.save_checkpoint(state, checkpoint, include_optimizer_state=True)
        module.eval()
        test_loss = float(module(images[TRAINED:], labels[TRAINED:]))
        module.export_model_for_inferencing(Path(temporary, "model.onnx"), ["output"])
        session = ort.InferenceSession(str(Path(temporary, "model.onnx")), providers=["CPUExecutionProvider"])
        (scores,) = session.run(None, {"input": images[TRAINED:]})
    accuracy = float(np.mean(scores.argmax(axis=1) == labels[TRAINED:]))
    json.dump({"accuracy": accuracy, "test_loss": test_loss, "losses": losses}, sys.stdout)


if __name__ == "__main__":
    main()
