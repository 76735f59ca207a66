"""The demo's training: real digits, a training step exported from PyTorch, one batch with an infinite pixel.

The step contains SGD with momentum, and has the learning rate as an input. The scaled step runs in the loop of
`graphscale train`: no code here knows about the loss scale, except to draw it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from graphscale.demo.digits import initial_state, read_step, split
from graphscale.errors import GraphscaleError
from graphscale.files.tensor_files import Arrays
from graphscale.pipeline import ScaledModel, scale
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.process.extras import RUNTIME, install_command
from graphscale.session import Session
from graphscale.session.loading import make_quiet_options
from graphscale.targets import CPU_PROVIDER, choose_target
from graphscale.training.data import Batches, Data
from graphscale.training.loop import Trainer
from graphscale.training.record import StepRecord
from graphscale.training.schedules import LearningRate

__all__ = ["Training", "require"]

BATCH = 64
LEARNING_RATE = 0.005
# The scale grows this often in a run; the overflow comes a little after the fourth growth.
GROWTHS, OVERFLOW_AT = 8, 0.57
INITIAL_LOSS_SCALE = 2.0**10
EVALUATIONS = 60


def require() -> None:
    """Check that the demo's additional packages can be imported.

    Raises:
        GraphscaleError: a package is missing.
    """
    missing = []
    needed = {"onnxruntime": "onnxruntime", "sklearn.datasets": "scikit-learn", "matplotlib.figure": "matplotlib"}
    for module, package in needed.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        raise GraphscaleError(
            f"the demo needs {' and '.join(missing)}, which cannot be imported here; install them: "
            f"{install_command('demo', *({RUNTIME} & {*missing}))}"
        )


class _WithOverflow(Batches):
    """Batches of digits, one of them with an infinite pixel."""

    def __init__(self, data: Data, seed: int, overflow: int) -> None:
        super().__init__(data, seed=seed)
        self._overflow = overflow

    def __getitem__(self, number: int) -> Arrays:
        batch = super().__getitem__(number)
        if number + 1 == self._overflow:
            batch["images"][0, 27] = np.inf
        return batch


class Training:
    """One training run.

    Args:
        steps: number of steps.
        seed: the seed of the split, the initial weights and the order of the batches.
        providers: ONNX Runtime's execution providers.

    Attributes:
        loss_scale: the policy, with several growths of the scale in a run.
        overflow: the number of the step with an infinite pixel in its batch.
        scaled: the scaled step.
    """

    def __init__(self, steps: int, seed: int, providers: Sequence[str] = (CPU_PROVIDER,)) -> None:
        import onnxruntime as ort

        self.steps = steps
        self.overflow = max(2, round(OVERFLOW_AT * steps))
        self.loss_scale = DynamicLossScale(INITIAL_LOSS_SCALE, increment_period=max(1, steps // GROWTHS))
        rng = np.random.default_rng(seed)
        train, self._held_out = split(rng)
        self._batches = _WithOverflow(Data(train, len(train["labels"]), BATCH), seed, self.overflow)
        self._initial = initial_state(rng)
        step = read_step("digits_step")
        self._plain = ort.InferenceSession(step, make_quiet_options(), providers=list(providers))
        target = choose_target(providers)
        self.scaled: ScaledModel = scale(onnx.ModelProto.FromString(step), self.loss_scale, target=target)
        self._session = Session(self.scaled, providers, state=self._initial)

    def run(self) -> Iterator[StepRecord]:
        """Train, with one record for each step; some have the share of right held-out digits as `accuracy`."""
        every = max(1, self.steps // EVALUATIONS)
        trainer = Trainer(self._session, self._batches, LearningRate(LEARNING_RATE), "learning_rate")
        for record in trainer.run(self.steps):
            if record.step % every == 0 or record.step in (1, self.steps):
                yield dataclasses.replace(record, outputs={**record.outputs, "accuracy": self._accuracy()})
            else:
                yield record

    def differing(self) -> list[str]:
        """Train again with the unscaled step, without the batch of the overflow, and compare every bit.

        Returns:
            the names of the weights and momentum buffers that differ from those of `run`.
        """
        names = [f"{name}.next" for name in self._initial]
        state = self._initial
        for step in range(1, self.steps + 1):
            if step != self.overflow:
                feeds = {**self._batches[step - 1], "learning_rate": np.asarray(LEARNING_RATE, np.float32)}
                values = self._plain.run(names, {**feeds, **state})
                state = dict(zip(self._initial, values, strict=True))
        trained = self._session.state_dict()
        return [name for name, value in state.items() if value.tobytes() != trained[name].tobytes()]

    def _accuracy(self) -> float:
        """Return the accuracy, from the logits of the unscaled step, without its next weights."""
        trained = self._session.state_dict()
        state = {name: trained[name] for name in self._initial}
        feeds = {**self._held_out, "learning_rate": np.asarray(LEARNING_RATE, np.float32), **state}
        (logits,) = self._plain.run(["logits"], feeds)
        return float((logits.argmax(axis=1) == self._held_out["labels"]).mean())
