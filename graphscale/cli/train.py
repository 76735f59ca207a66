"""graphscale train: train from a scaled step, with checkpoints that an interrupted run resumes from."""

from __future__ import annotations

import dataclasses
import signal
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from graphscale.cli import train_options as opt
from graphscale.cli.progress import Tally, show_table
from graphscale.errors import TrainingError
from graphscale.replicas.launch import launched_size
from graphscale.training.interrupt import Interruption
from graphscale.training.record import StepRecord
from graphscale.training.schedules import LearningRate

if TYPE_CHECKING:
    from graphscale.training.loop import Trainer
    from graphscale.training.run import Options, Run

__all__ = ["train"]


def train(
    step: opt.Step,
    data: opt.Data,
    epochs: opt.Epochs = None,
    max_steps: opt.MaxSteps = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Seed = 0,
    no_shuffle: opt.NoShuffle = False,
    feed: opt.Feed = None,
    state: opt.State = None,
    ignore_extra: opt.IgnoreExtra = False,
    learning_rate: opt.LearningRateValue = None,
    learning_rate_input: opt.LearningRateInput = None,
    schedule: opt.Schedule = "constant",
    warmup: opt.Warmup = 0,
    final_learning_rate: opt.FinalLearningRate = None,
    decay_steps: opt.DecaySteps = None,
    decay_rate: opt.DecayRate = None,
    power: opt.Power = None,
    checkpoint_dir: opt.CheckpointDir = None,
    checkpoint_every: opt.CheckpointEvery = None,
    keep: opt.Keep = 3,
    resume: opt.Resume = False,
    metrics: opt.Metrics = None,
    logdir: opt.Logdir = None,
    output: opt.Output = None,
    provider: opt.Provider = None,
    quiet: opt.Quiet = False,
    replicas: opt.Replicas = None,
    bucket_size: opt.BucketSize = "25MiB",
    stages: opt.Stages = 1,
    sharded: opt.Sharded = False,
    timeout: opt.Timeout = 300.0,
) -> None:
    """Train from a scaled step: batches, learning rate, checkpoints, metrics. Ctrl-C saves and stops.

    Started by mpiexec, each process trains one replica on its share of every batch.
    """
    from graphscale.training.run import Options, Run

    rate = None
    if learning_rate is not None:
        rate = LearningRate(learning_rate, schedule, warmup, final_learning_rate, decay_steps, decay_rate, power)
    else:
        _refuse_without_rate(
            {
                "--schedule": schedule if schedule != "constant" else None,
                "--warmup": warmup or None,
                "--final-learning-rate": final_learning_rate,
                "--decay-steps": decay_steps,
                "--decay-rate": decay_rate,
                "--power": power,
                "--learning-rate-input": learning_rate_input,
            }
        )
    options = Options(
        step=step,
        data=data,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        seed=seed,
        shuffle=not no_shuffle,
        learning_rate=rate,
        rate_input=learning_rate_input,
        feeds=feed or (),
        state=state,
        ignore_extra=ignore_extra,
        providers=provider or (),
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        metrics=metrics,
        logdir=logdir,
        output=output,
    )
    if replicas is None and launched_size() == 1:
        _run(options, Run(options), Console(highlight=False, quiet=quiet))
        return
    from graphscale.replicas.replica_world import ReplicaWorld

    world = ReplicaWorld(replicas, bucket_bytes=bucket_size, stages=stages, sharded=sharded, timeout=timeout)
    with world.ending_together():
        options = dataclasses.replace(options, world=world)
        _run(options, Run(options), Console(highlight=False, quiet=quiet or not world.is_first))


def _refuse_without_rate(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise TrainingError(f"{option} goes with --learning-rate")


def _run(options: Options, run: Run, console: Console) -> None:
    done = run.resumed.steps if run.resumed else 0
    if done:
        console.print(f"resumed at step {done} of {run.total}")
    tally = Tally()
    with run.session, Interruption() as interruption:
        with run.opened() as trainer:
            records = trainer.run(run.total, lambda: run.is_interrupted(interruption))
            for _ in tally.follow(records, console, run.total, done):
                pass
        if tally.last is not None and tally.last.stuck:
            _stop(_stuck(tally.last, trainer), 1, run.writes)
        if run.is_interrupted(interruption):
            _stop(_interrupted(trainer, run.total), 128 + (interruption.received or signal.SIGINT), run.writes)
        if options.output is not None:
            run.session.export(options.output)
    rows = tally.rows() or [("steps", f"none left to train: the checkpoint is at step {done} of {run.total}")]
    for name, path in (
        ("checkpoint", trainer.checkpoint),
        ("metrics", options.metrics),
        ("TensorBoard", options.logdir),
        ("trained step", options.output),
    ):
        if path is not None:
            rows.append((name, escape(str(path))))
    show_table(console, rows)


def _stuck(record: StepRecord, trainer: Trainer) -> str:
    why = f" ({record.cause} in the gradient {record.offender})" if record.offender else ""
    return (
        f"stopped at step {record.step}: the loss scale is stuck at {record.next_loss_scale:g}, since gradients stay "
        f"non-finite{why}; look for NaN and Inf in the data and the weights, or lower the learning rate"
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
        print(f"graphscale: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)
