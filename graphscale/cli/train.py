"""graphscale train: train from a scaled step, with checkpoints that an interrupted run resumes from."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from graphscale.cli import display
from graphscale.cli.options import BUCKET_SIZE, Provider, argument, option, refuse_one_file
from graphscale.cli.progress import Tally, show_table
from graphscale.cli.running import running
from graphscale.cli.show import is_verbose, make_console, make_text, print_json
from graphscale.errors import TrainingError
from graphscale.process.streams import tell
from graphscale.training.loop import Trainer
from graphscale.training.record import StepRecord
from graphscale.training.run import Interruption, Options, Run
from graphscale.training.schedules import SCHEDULES, LearningRate

__all__ = ["train"]

_data = functools.partial(option, rich_help_panel="Data")
_rate = functools.partial(option, rich_help_panel="Learning rate")
_files = functools.partial(option, rich_help_panel="Output")
_replicas = functools.partial(option, rich_help_panel="Replicas, started by mpiexec -n N graphscale train")
_LABELS = {"logdir": "TensorBoard", "output": "trained step"}
_SCHEDULING = ("schedule", "warmup", "final_learning_rate", "decay_steps", "decay_rate", "power")
_REPLICATING = ("bucket_size", "stages", "sharded", "timeout")


def train(
    step: Annotated[Path, argument("A scaled training step.", metavar="STEP.onnx")],
    data: Annotated[
        Path,
        _data("Arrays named like the inputs of the step; the first axis of each is the samples.", metavar="FILE.npz"),
    ],
    epochs: Annotated[int | None, _data("Passes through the data. Default: 1.")] = None,
    max_steps: Annotated[int | None, _data("The last step at the latest; skipped steps count.", metavar="N")] = None,
    batch_size: Annotated[int | None, _data("Samples in a step. Default: as the step fixes it, or 32.")] = None,
    seed: Annotated[int, _data("The seed of the shuffling.")] = 0,
    no_shuffle: Annotated[bool, _data("Take the samples in their order.")] = False,
    feed: Annotated[
        list[str] | None,
        _data(
            "An input that is the same in every step: a number, true, false, or an .npy file. Repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    state: Annotated[
        Path | None, _data("First values of carried inputs (weights, moments): .npz or .safetensors.", metavar="FILE")
    ] = None,
    ignore_extra: Annotated[bool, _data("Ignore arrays in --data and --state that the step has no input for.")] = False,
    learning_rate: Annotated[float | None, _rate("The learning rate, which is fed to the step.")] = None,
    learning_rate_input: Annotated[
        str | None, _rate("The input that it is fed to. Default: learning_rate or lr.", metavar="NAME")
    ] = None,
    schedule: Annotated[
        str, _rate(f"{', '.join(SCHEDULES)}. A skipped step does not advance it.", choices=SCHEDULES, metavar="NAME")
    ] = "constant",
    warmup: Annotated[
        int, _rate("Applied steps of linear growth at the beginning.", metavar="STEPS", show_default=False)
    ] = 0,
    final_learning_rate: Annotated[float | None, _rate("The last, or lowest, one. Default: 0.")] = None,
    decay_steps: Annotated[
        int | None,
        _rate(
            "Applied steps of the decay (default: the rest of the run); of one round for step and exponential.",
            metavar="STEPS",
        ),
    ] = None,
    decay_rate: Annotated[float | None, _rate("The factor of each round: step and exponential. Default: 0.1.")] = None,
    power: Annotated[float | None, _rate("The power of the polynomial. Default: 1.")] = None,
    checkpoint_dir: Annotated[Path | None, _files("The folder of the checkpoints.", metavar="DIR")] = None,
    checkpoint_every: Annotated[
        int | None, _files("Steps between two of them. Default: an epoch.", metavar="STEPS")
    ] = None,
    keep: Annotated[int, _files("The number of checkpoints that stay.", "--keep-checkpoints", metavar="N")] = 3,
    resume: Annotated[bool, _files("Go on from the newest checkpoint; begin where there is none yet.")] = False,
    metrics: Annotated[Path | None, _files("A file of one row per step: .jsonl or .csv.", metavar="FILE")] = None,
    logdir: Annotated[Path | None, _files("Event files for TensorBoard.", metavar="DIR")] = None,
    output: Annotated[
        Path | None, _files("The step with its trained weights in it.", "-o", "--output", metavar="FILE.onnx")
    ] = None,
    provider: Provider = None,
    replicas: Annotated[
        int | None, _replicas("Refuse another number of processes. Default: as many as mpiexec starts.", metavar="N")
    ] = None,
    bucket_size: Annotated[str, _replicas("The largest message: bytes, or like 25MiB.", metavar="SIZE")] = BUCKET_SIZE,
    stages: Annotated[int, _replicas("Parts of the backward pass that overlap with messages.", metavar="N")] = 1,
    sharded: Annotated[
        bool, _replicas("Each replica keeps and updates a share of weights and moments (ZeRO, stage 1).")
    ] = False,
    timeout: Annotated[float, _replicas("The longest wait for other replicas.", metavar="SECONDS")] = 300.0,
) -> None:
    """Train from a scaled step: batches, learning rate, checkpoints, metrics. Ctrl-C saves and stops.

    Started by mpiexec, each process trains one replica on its share of every batch.

    Examples:
        graphscale train step.onnx --data data.npz --state state.npz
        graphscale train step.onnx --data data.npz --learning-rate 0.1 --epochs 2
        graphscale train step.onnx --data data.npz --checkpoint-dir run --resume
    """
    given = locals()
    from graphscale.replicas.collectives import launched_size

    refuse_one_file({"--metrics": metrics, "-o": output})
    if checkpoint_dir is None and keep != Options.keep:
        raise TrainingError("--keep-checkpoints goes with --checkpoint-dir")
    rate = None
    if learning_rate is not None:
        rate = LearningRate(learning_rate, schedule, warmup, final_learning_rate, decay_steps, decay_rate, power)
    else:
        parameters = inspect.signature(train).parameters
        for name in (*_SCHEDULING, "learning_rate_input"):
            if given[name] != parameters[name].default:
                raise TrainingError(f"--{name.replace('_', '-')} goes with --learning-rate")
    same = {field.name: given[field.name] for field in dataclasses.fields(Options) if field.name in given}
    same |= {"shuffle": not no_shuffle, "learning_rate": rate, "rate_input": learning_rate_input}
    options = Options(**{**same, "feeds": feed or (), "providers": provider or ()})
    if replicas is None and launched_size() == 1:
        _refuse_alone(given)
        with running([step], training=True):
            _run(options, Run(options), make_console())
        return
    from graphscale.replicas.replica_world import ReplicaWorld

    world = ReplicaWorld(replicas, bucket_bytes=bucket_size, stages=stages, sharded=sharded, timeout=timeout)
    if not world.is_first:
        display.silence()
    with world.ending_together():
        options = dataclasses.replace(options, world=world)
        _run(options, Run(options), make_console(quiet=not world.is_first))


def _refuse_alone(given: Mapping[str, Any]) -> None:
    """Refuse options of replicas without a launcher of MPI; `mpiexec -n 1` may have them."""
    from graphscale.replicas.collectives import has_launcher

    parameters = inspect.signature(train).parameters
    for name in _REPLICATING if not has_launcher() else ():
        if given[name] != parameters[name].default:
            option = name.replace("_", "-")
            raise TrainingError(f"--{option} goes with replicas: mpiexec -n N graphscale train STEP --{option} ...")


def _run(options: Options, run: Run, console: Console) -> None:
    done = run.resumed.steps if run.resumed else 0
    if done:
        console.print(f"resumed at step {done} of {run.total}")
    tally = Tally()
    with run.session, Interruption() as interruption:
        with run.opened() as trainer:
            records = trainer.run(run.total, lambda: run.is_interrupted(interruption))
            for record in tally.follow(records, run.total):
                if is_verbose() and not record.applied:
                    console.print(make_text(f"step {record.step} skipped, loss scale {_change(record)}"))
        stuck = tally.last is not None and tally.last.stuck
        end = "stuck" if stuck else "interrupted" if run.is_interrupted(interruption) else "done"
        if options.output is not None and end == "done":
            run.session.export(options.output)
        files = {
            "checkpoint": trainer.checkpoint,
            "metrics": options.metrics,
            "logdir": options.logdir,
            "output": options.output if end == "done" else None,
        }
        written = {name: None if path is None else str(path) for name, path in files.items()}
        if run.writes:
            print_json(lambda: {"end": end, "resumed_at": done, **tally.to_dict(), **written})
        if tally.last is not None and stuck:
            _stop(_stuck(tally.last, trainer), 1, run.writes)
        if end == "interrupted":
            _stop(_interrupted(trainer, run.total), 128 + (interruption.received or signal.SIGINT), run.writes)
    rows = tally.rows() or [("steps", f"none left to train: the checkpoint is at step {done} of {run.total}")]
    rows.extend((_LABELS.get(name, name), path) for name, path in written.items() if path is not None)
    show_table(console, rows)


def _change(record: StepRecord) -> str:
    cause = f": {record.cause} in the gradient {record.offender}" if record.offender else ""
    return f"{record.loss_scale:g} -> {record.next_loss_scale:g}{cause}"


def _stuck(record: StepRecord, trainer: Trainer) -> str:
    first = f"; the first value of the forward pass is {record.activation}" if record.activation else ""
    why, hint = f" ({record.cause} in the gradient {record.offender}{first})", ""
    if record.offender is None:
        why, hint = "", "; scaled with --telemetry, the step would name the gradient"
    return (
        f"stopped at step {record.step}: the loss scale is stuck at {record.next_loss_scale:g}, since gradients stay "
        f"non-finite{why}; look for NaN and Inf in the data and the weights, or lower the learning rate{hint}"
        + (f"; the checkpoint is {trainer.checkpoint}" if trainer.checkpoint else "")
    )


def _interrupted(trainer: Trainer, total: int) -> str:
    if trainer.checkpoint is None:
        return f"interrupted at step {trainer.steps} of {total}; nothing is saved: there is no --checkpoint-dir"
    return (
        f"interrupted at step {trainer.steps} of {total}, which is saved in {trainer.checkpoint}; "
        "give the same command with --resume to go on"
    )


def _stop(message: str, code: int, speaks: bool) -> None:
    if speaks:
        tell(message)
    raise SystemExit(code)
