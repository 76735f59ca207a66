"""The options of graphscale train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphscale.training.schedules import SCHEDULES

__all__ = [
    "BatchSize",
    "BucketSize",
    "CheckpointDir",
    "CheckpointEvery",
    "Data",
    "DecayRate",
    "DecaySteps",
    "Epochs",
    "Feed",
    "FinalLearningRate",
    "IgnoreExtra",
    "Keep",
    "LearningRateInput",
    "LearningRateValue",
    "Logdir",
    "MaxSteps",
    "Metrics",
    "NoShuffle",
    "Output",
    "Power",
    "Provider",
    "Quiet",
    "Replicas",
    "Resume",
    "Schedule",
    "Seed",
    "Sharded",
    "Stages",
    "State",
    "Step",
    "Timeout",
    "Warmup",
]


def _option(panel: str, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **{"show_default": False, **more})


def _data(*names: str, help: str, **more: Any) -> Any:
    return _option("Data", *names, help=help, **more)


def _rate(*names: str, help: str, **more: Any) -> Any:
    return _option("Learning rate", *names, help=help, **more)


def _files(*names: str, help: str, **more: Any) -> Any:
    return _option("Checkpoints, logs, output", *names, help=help, **more)


def _replicas(*names: str, help: str, **more: Any) -> Any:
    return _option("Replicas (mpiexec -n N graphscale train ...)", *names, help=help, **more)


Step = Annotated[Path, typer.Argument(metavar="STEP.onnx", help="A scaled training step.", show_default=False)]
Provider = Annotated[
    list[str] | None,
    typer.Option(help="An execution provider. May be repeated. Default: the CPU.", show_default=False),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors and interruptions only.")]

Replicas = Annotated[
    int | None, _replicas(metavar="N", help="Refuse another number of processes. Default: as many as mpiexec starts.")
]
BucketSize = Annotated[
    str, _replicas(metavar="SIZE", help="Of a message at most: bytes, or like 25MiB.", show_default=True)
]
Stages = Annotated[
    int, _replicas(metavar="N", help="Parts of the backward pass that overlap with messages.", show_default=True)
]
Sharded = Annotated[
    bool, _replicas("--sharded", help="Each replica keeps and updates a share of weights and moments (ZeRO, stage 1).")
]
Timeout = Annotated[float, _replicas(metavar="SECONDS", help="To wait for the other replicas.", show_default=True)]

Data = Annotated[
    Path,
    _data(metavar="FILE.npz", help="Arrays named like the inputs of the step; the first axis of each is the samples."),
]
Epochs = Annotated[int | None, _data(help="Times through the data. Default: 1.")]
MaxSteps = Annotated[int | None, _data(metavar="N", help="The last step at the latest; skipped ones count.")]
BatchSize = Annotated[int | None, _data(help="Samples in a step. Default: what the step fixes, or 32.")]
Seed = Annotated[int, _data(help="Of the shuffling.", show_default=True)]
NoShuffle = Annotated[bool, _data("--no-shuffle", help="Take the samples in their order.")]
Feed = Annotated[
    list[str] | None,
    _data(
        metavar="NAME=VALUE",
        help="An input that is the same in every step: a number, true, false, or an .npy file. May be repeated.",
    ),
]
State = Annotated[
    Path | None,
    _data(metavar="FILE", help="First values of carried inputs (weights, moments): .npz or .safetensors."),
]
IgnoreExtra = Annotated[
    bool, _data("--ignore-extra", help="Ignore arrays in --data and --state that the step has no input for.")
]

LearningRateValue = Annotated[float | None, _rate("--learning-rate", help="Fed to the step.")]
LearningRateInput = Annotated[
    str | None, _rate(metavar="NAME", help="The input that takes it. Default: learning_rate or lr.")
]
Schedule = Annotated[
    str, _rate(metavar="NAME", help=f"{', '.join(SCHEDULES)}. A skipped step does not advance it.", show_default=True)
]
Warmup = Annotated[int, _rate(metavar="STEPS", help="Applied steps of linear growth at the beginning.")]
FinalLearningRate = Annotated[float | None, _rate(help="The last, or lowest, one. Default: 0.")]
DecaySteps = Annotated[
    int | None,
    _rate(
        metavar="STEPS",
        help="Applied steps of the decay (default: the rest of the run); of one round for step and exponential.",
    ),
]
DecayRate = Annotated[float | None, _rate(help="The factor of each round: step and exponential. Default: 0.1.")]
Power = Annotated[float | None, _rate(help="Of the polynomial. Default: 1.")]

CheckpointDir = Annotated[Path | None, _files(metavar="DIR", help="Where checkpoints go.")]
CheckpointEvery = Annotated[int | None, _files(metavar="STEPS", help="Steps between them. Default: an epoch.")]
Keep = Annotated[int, _files(metavar="N", help="So many of the newest stay.", show_default=True)]
Resume = Annotated[bool, _files("--resume", help="Go on from the newest checkpoint; begin where there is none yet.")]
Metrics = Annotated[Path | None, _files(metavar="FILE", help="One row a step: .jsonl or .csv.")]
Logdir = Annotated[Path | None, _files(metavar="DIR", help="Event files for TensorBoard.")]
Output = Annotated[
    Path | None, _files("-o", "--output", metavar="FILE.onnx", help="The step with its trained weights in it.")
]
