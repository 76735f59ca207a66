"""A run from files: all input is read and checked before the first write."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from graphscale.errors import TrainingError
from graphscale.files import model_files, writing
from graphscale.files.reading import read_file
from graphscale.files.tensor_files import read_npz
from graphscale.graph.stamp_reading import read_stamp
from graphscale.process.stages import report_stage
from graphscale.session import Session
from graphscale.training.batch_feeds import check_fed, find_rate_input, parse_feeds
from graphscale.training.checkpoints import Checkpoints, Position
from graphscale.training.data import Arrays, Batches, Data, load_arrays
from graphscale.training.loop import Trainer
from graphscale.training.metrics import MetricsFile, check_metrics
from graphscale.training.schedules import LearningRate
from graphscale.training.tensorboard import TensorBoard, check_logdir

__all__ = ["Interruption", "Options", "Run", "World"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class World:
    """The processes of a run: this one alone, or those of a subclass.

    Attributes:
        is_first: True if this process writes and draws, as one of several does.
    """

    is_first: bool = True

    def agree(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Check that all processes have the same settings.

        Raises:
            ReplicaError: settings differ; the message names the first.
        """

    def load(self, path: Path) -> Arrays:
        """Load the arrays of a file of data."""
        report_stage(f"reading {path}")
        return read_npz(path, TrainingError)

    def batches(self, data: Data, size: int | None, seed: int, shuffle: bool) -> Batches:
        """Cut the data into the batches of this process."""
        return Batches(data, size, seed, shuffle)

    def checkpoints(self, folder: Path, keep: int) -> Checkpoints:
        """Open the folder of the run's checkpoints."""
        return Checkpoints(folder, keep)

    def session(self, step: Path, *, providers: list[str] | None, state: Mapping[str, Any]) -> Session:
        """Open the session of this process."""
        return Session(step, providers=providers, state=state)

    def stops(self, signalled: bool) -> bool:
        """Return whether the run ends with the last step, after a signal to a process."""
        return signalled


class Interruption:
    """A context that records SIGINT and SIGTERM in `received`; the step, its checkpoint and metrics are finished.

    A second signal has its usual effect, so that a hanging step can be ended. Outside the main thread, Python allows no
    handlers, and signals are not recorded.

    Attributes:
        received: the signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of a run.

    Attributes:
        step: the scaled step, an ONNX file.
        data: an .npz file with arrays named like the inputs of the step, the first axis of each the samples.
        epochs: passes through the data; None for one, or as many as `max_steps` needs.
        max_steps: the largest number of steps, skipped ones included.
        batch_size: the batch size; None for the step's fixed size, or 32.
        seed: the seed of the shuffling.
        shuffle: True to shuffle the samples.
        learning_rate: the learning rate; a decay without a length is fitted to the run.
        rate_input: the input for the learning rate; None to find it.
        feeds: `NAME=VALUE` for inputs with a constant feed.
        state: an .npz or .safetensors file with first values of carried inputs.
        ignore_extra: True to ignore arrays of `data` and `state` without an input of the step.
        providers: execution providers.
        checkpoint_dir: the folder of the checkpoints; None for none.
        checkpoint_every: steps between checkpoints; None for an epoch.
        keep: the number of checkpoints to keep.
        resume: True to continue from the newest checkpoint, if any.
        metrics: a .jsonl or .csv file.
        logdir: a folder for TensorBoard's event files.
        output: the file of the trained step.
        world: the processes that train together, by default this one alone.
    """

    step: Path
    data: Path
    epochs: int | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    learning_rate: LearningRate | None = None
    rate_input: str | None = None
    feeds: Sequence[str] = ()
    state: Path | None = None
    ignore_extra: bool = False
    providers: Sequence[str] = ()
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    resume: bool = False
    metrics: Path | None = None
    logdir: Path | None = None
    output: Path | None = None
    world: World = dataclasses.field(default_factory=World)


class Run:
    """A run, ready to begin: all input is read and checked, and no output is written.

    Attributes:
        session: the session, with the state of the checkpoint in a resumed run.
        batches: the batches.
        total: the steps of the whole run.
        resumed: the position of a resumed run; None for a new run.
        writes: True if this process writes and draws, as one of several replicas does.

    Raises:
        GraphscaleError: inputs do not fit.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        _check_options(options)
        world = options.world
        arrays = world.load(options.data)
        self._checkpoints: Checkpoints | None = None
        if options.checkpoint_dir is not None:
            self._checkpoints = world.checkpoints(options.checkpoint_dir, options.keep)
            if not options.resume:
                self._checkpoints.refuse_existing()
        self.session = self._open_session()
        inputs = self.session.inputs
        if options.ignore_extra:
            arrays = {name: array for name, array in arrays.items() if name in inputs}
        self._feeds: dict[str, np.ndarray[Any, Any]] = parse_feeds(options.feeds, inputs)
        data = Data.check(arrays, inputs, str(options.data))
        self._rate_input = find_rate_input(options.rate_input, inputs, [*arrays, *self._feeds])
        self._check_rate()
        rate = [self._rate_input] if options.learning_rate and self._rate_input else []
        check_fed(inputs, list(arrays), [*self._feeds, *rate], str(options.data))
        self.batches: Batches = world.batches(data, options.batch_size, options.seed, options.shuffle)
        self.total = _total(options, self.batches.per_epoch)
        self._learning_rate = options.learning_rate and options.learning_rate.for_run(self.total)
        self.resumed: Position | None = None
        world.agree(lambda: {**self._settings(), "the number of steps": self.total})
        if self._checkpoints is not None:
            self._checkpoints.settings = self._settings()
            self.resumed = self._resume(self._checkpoints) if options.resume else None
        self.writes = world.is_first
        if options.metrics is not None and self.writes:
            check_metrics(options.metrics, self._metrics_bytes)

    @contextmanager
    def opened(self) -> Iterator[Trainer]:
        """Open the files of the run, and close them at the end.

        Raises:
            GraphscaleError: a file cannot be written.
        """
        options = self._options
        metrics = tensorboard = None
        with ExitStack() as stack:
            if self._checkpoints is not None:
                stack.enter_context(self._checkpoints.opened())
            if options.metrics is not None and self.writes:
                metrics = stack.enter_context(closing(MetricsFile(options.metrics, self._metrics_bytes)))
            if options.logdir is not None and self.writes:
                steps = self.resumed.steps if self.resumed else None
                tensorboard = stack.enter_context(closing(TensorBoard(options.logdir, steps)))
            yield Trainer(
                self.session,
                self.batches,
                self._learning_rate,
                self._rate_input or "",
                self._feeds,
                position=self.resumed,
                metrics=metrics,
                tensorboard=tensorboard,
                checkpoints=self._checkpoints,
                every=options.checkpoint_every or self.batches.per_epoch,
            )

    def is_interrupted(self, interruption: Interruption) -> bool:
        """Return whether the run ends with the last step, after a signal to a process."""
        return self._options.world.stops(interruption.received is not None)

    def _open_session(self) -> Session:
        options = self._options
        state: Arrays = {}
        if options.state is not None:
            # With replicas, rank 0 sends the state to all.
            state = load_arrays(options.state) if options.world.is_first else {}
            if options.ignore_extra:
                carried = read_stamp(model_files.load(options.step), str(options.step)).carried
                state = {name: array for name, array in state.items() if name in carried}
        elif self._checkpoints is not None and options.resume:
            state = self._checkpoints.newest_state()
        providers = list(options.providers) or None
        return options.world.session(options.step, providers=providers, state=state)

    @property
    def _metrics_bytes(self) -> int | None:
        return self.resumed.metrics_bytes if self.resumed else None

    def _check_rate(self) -> None:
        given, name = self._options.learning_rate is not None, self._rate_input
        if given and name is None:
            raise TrainingError(
                "--learning-rate is given, but the step has no input for it: a floating-point scalar called "
                "learning_rate or lr; name another with --learning-rate-input"
            )
        if not given and name is not None and not self.session.inputs[name].optional:
            raise TrainingError(f"the step takes its learning rate from the input {name!r}; give --learning-rate")

    def _resume(self, checkpoints: Checkpoints) -> Position | None:
        position = checkpoints.resume(self.session)
        if position and position.steps > self.total:
            raise TrainingError(
                f"the newest checkpoint in {checkpoints.folder} is at step {position.steps}, past the end of this run "
                f"of {self.total} steps; give more --epochs or --max-steps"
            )
        return position

    def _settings(self) -> dict[str, Any]:
        """Return the settings that define the run, without its length, which may grow."""
        data, rate = self.batches.data, self._learning_rate
        return {
            "the step": f"sha256:{hashlib.sha256(read_file(self._options.step)).hexdigest()}",
            "the data": data.describe(),
            "the content of the data": f"sha256:{data.sha256}",
            "--batch-size": self.batches.size,
            "--seed": self.batches.seed,
            "shuffling": self.batches.shuffle,
            "--learning-rate-input": self._rate_input if rate else None,
            **(rate.settings() if rate else {}),
            **{f"--feed {name}": _describe(array) for name, array in self._feeds.items()},
        }


def _describe(array: np.ndarray[Any, Any]) -> Any:
    if array.size == 1:
        return str(array.item())
    return f"sha256:{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def _check_options(options: Options) -> None:
    for option in ("epochs", "max_steps", "checkpoint_every"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise TrainingError(f"--{option.replace('_', '-')} {value}: expected 1 or more")
    if options.checkpoint_dir is None and (options.resume or options.checkpoint_every):
        option = "--resume" if options.resume else "--checkpoint-every"
        raise TrainingError(f"{option} goes with --checkpoint-dir")
    if options.output is not None:
        writing.check_new_output(options.output)
    if options.metrics is not None:
        check_metrics(options.metrics)
    if options.logdir is not None:
        check_logdir(options.logdir)


def _total(options: Options, per_epoch: int) -> int:
    if options.epochs is None and options.max_steps is not None:
        return options.max_steps
    steps = (options.epochs or 1) * per_epoch
    return steps if options.max_steps is None else min(steps, options.max_steps)
