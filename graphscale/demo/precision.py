"""The demo's comparison: two networks, each trained in float32 and in float16 without, with fixed and dynamic scale.

On a CPU float16 is emulated by `graphscale.autocast`: every value that would be float16 is rounded to it, so that small
gradients become zero just as they do on a GPU. On a GPU float16 is real.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from graphscale.demo import digits, reversal
from graphscale.files.tensor_files import Arrays
from graphscale.passes import Autocast
from graphscale.pipeline import scale
from graphscale.policy.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from graphscale.session import Session
from graphscale.session.loading import make_quiet_options
from graphscale.targets import CPU_PROVIDER, CUDA_PROVIDER, choose_target
from graphscale.training.data import Batches, Data
from graphscale.training.loop import Trainer
from graphscale.training.record import StepRecord
from graphscale.training.schedules import LearningRate

__all__ = ["FIXED", "Run", "Task", "Way", "tasks", "train", "ways"]

FIXED = 1024
GROWTHS = 12  # number of possible growths of the dynamic scale in a run
DIGITS = 256  # in a batch
SEQUENCES, HELD_OUT = 4096, 256
_THREADS = 1  # limit: these graphs are too small for more


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train: its name, True for float16, and the loss scale."""

    name: str
    float16: bool
    loss_scale: LossScale


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to learn.

    Attributes:
        name: its name in tables.
        title: its name in the picture, in two lines.
        choices: number of possible answers.
        step: the exported float32 training step.
        state: initial weights, moments and counters.
        batches: the training batches.
        feeds: other feeds of each step.
        learning_rate: the learning rate of all steps.
        loss: returns the loss of a step's record, without its weight in the graph.
        hits: returns the share of right held-out answers for a state.
    """

    name: str
    title: str
    choices: int
    step: onnx.ModelProto
    state: Arrays
    batches: Batches
    feeds: Arrays
    learning_rate: float
    loss: Callable[[StepRecord], float]
    hits: Callable[[Mapping[str, np.ndarray[Any, Any]]], float]


@dataclasses.dataclass
class Run:
    """One task, trained in one way: a record for each step so far, and finally the share of right answers."""

    task: Task
    way: Way
    records: list[StepRecord] = dataclasses.field(default_factory=list)
    accuracy: float = float("nan")

    @property
    def losses(self) -> np.ndarray[Any, Any]:
        """The loss of each step."""
        return np.asarray([self.task.loss(record) for record in self.records])

    @property
    def zeros(self) -> np.ndarray[Any, Any]:
        """The share of gradient elements that were zero in each step, 0 to 1."""
        return np.asarray([record.zero_fraction for record in self.records], dtype=np.float64)


def ways(steps: int) -> tuple[Way, ...]:
    """Return the ways: float32, and float16 without a loss scale, with a fixed one, and with a dynamic one."""
    dynamic = DynamicLossScale(increment_period=max(1, steps // GROWTHS))
    return (
        Way("float32", False, FixedLossScale(1)),
        Way("float16, not scaled", True, FixedLossScale(1)),
        Way(f"float16, fixed scale {FIXED}", True, FixedLossScale(FIXED)),
        Way("float16, dynamic scale", True, dynamic),
    )


def tasks(seed: int) -> tuple[Task, ...]:
    """Return the digits and the sequences.

    Args:
        seed: the seed of the split, the initial weights and the order of the batches.
    """
    return _digits(seed), _reversal(seed)


def train(task: Task, way: Way, steps: int, providers: Sequence[str] = (CPU_PROVIDER,)) -> Iterator[Run]:
    """Train a task in one way. Each step yields the same object, with one more record."""
    pass_ = Autocast("float16", emulate=CUDA_PROVIDER not in providers) if way.float16 else None
    target = choose_target(providers)
    # A fixed scale neither checks nor skips by default, and telemetry needs a checked step.
    scaled = scale(task.step, way.loss_scale, target=target, telemetry=True, skip_nonfinite=True, autocast=pass_)
    run = Run(task, way)
    with Session(scaled, providers, state=task.state, session_options=_make_options()) as session:
        trainer = Trainer(session, task.batches, LearningRate(task.learning_rate), feeds=task.feeds)
        for record in trainer.run(steps):
            run.records.append(record)
            if record.step == steps:
                trained = session.state_dict()
                run.accuracy = task.hits({name: trained[name] for name in task.state})
            yield run


def _digits(seed: int) -> Task:
    rng = np.random.default_rng(seed)
    step = digits.read_step("digits_step")
    train_on, held_out = digits.split(rng)
    rate = 0.2

    def hits(state: Mapping[str, np.ndarray[Any, Any]]) -> float:
        logits = _run(step, "logits", {**held_out, **state, "learning_rate": np.float32(rate)})
        return float((logits.argmax(axis=1) == held_out["labels"]).mean())

    return Task(
        name="digits",
        title=f"A perceptron reads digits\nits loss is the mean over {DIGITS} pictures",
        choices=10,
        step=onnx.ModelProto.FromString(step),
        state=digits.initial_state(rng),
        batches=Batches(Data(train_on, len(train_on["labels"]), DIGITS), seed=seed),
        feeds={},
        learning_rate=rate,
        loss=lambda record: record.loss,
        hits=hits,
    )


def _reversal(seed: int) -> Task:
    rng = np.random.default_rng(seed)
    step = digits.read_step("reversal_step")
    model = onnx.ModelProto.FromString(step)
    train_on = reversal.sequences(rng, SEQUENCES)
    held_out = Batches(Data(reversal.sequences(rng, HELD_OUT), HELD_OUT, reversal.BATCH), shuffle=False)
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in model.graph.input}
    given = {*train_on, *reversal.FEEDS, "learning_rate"}
    rate = 2e-3

    def hits(state: Mapping[str, np.ndarray[Any, Any]]) -> float:
        feeds = {**reversal.FEEDS, **state, "learning_rate": np.float32(rate)}
        batches = range(held_out.per_epoch)
        return float(np.mean([_run(step, "accuracy", {**feeds, **held_out[i]}) for i in batches]))

    return Task(
        name="reversal",
        title="A transformer reverses sequences\nits loss is the mean over 16.8 million tokens, 512 of them at a time",
        choices=reversal.VOCABULARY,
        step=model,
        state=reversal.initial_state(rng, {name: shape for name, shape in shapes.items() if name not in given}),
        batches=Batches(Data(train_on, SEQUENCES, reversal.BATCH), seed=seed),
        feeds=reversal.FEEDS,
        learning_rate=rate,
        loss=lambda record: record.outputs["cross_entropy"],
        hits=hits,
    )


def _make_options() -> Any:
    options = make_quiet_options()
    options.intra_op_num_threads = _THREADS
    return options


def _run(step: bytes, output: str, feeds: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Run an exported step once, in float32, for one of its outputs."""
    import onnxruntime as ort

    session = ort.InferenceSession(step, _make_options(), providers=[CPU_PROVIDER])
    return np.asarray(session.run([output], {name: np.asarray(value) for name, value in feeds.items()})[0])
