"""Options and their parsing that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graphscale.errors import InvalidLossScaleError, UpdateError
from graphscale.policy import presets
from graphscale.policy.loss_scale import DynamicLossScale, LossScale, get
from graphscale.targets import target_names

__all__ = [
    "Gradient",
    "IncrementPeriod",
    "InitialLossScale",
    "Json",
    "Loss",
    "ModelPath",
    "Multiplier",
    "Seed",
    "Target",
    "Update",
    "parse_loss_scale",
    "parse_updates",
]

ModelPath = Annotated[Path, typer.Argument(help="An ONNX training graph.", show_default=False)]
Loss = Annotated[str | None, typer.Option(help="The loss. Default: found.", show_default=False)]
Seed = Annotated[
    str | None,
    typer.Option(metavar="NODE:INDEX", help="Where the scale enters. Default: found.", show_default=False),
]
Gradient = Annotated[
    list[str] | None, typer.Option(help="A value that is a gradient. May be repeated.", show_default=False)
]
Update = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OUT=IN",
        help="Output OUT is the next value of input IN. May be repeated.",
        show_default=False,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(help=f"The runtime: {target_names()}. Default: onnx; for a folder ort-training.", show_default=False),
]
InitialLossScale = Annotated[
    float | None, typer.Option(help="The dynamic scale at the beginning. Default: 32768.", show_default=False)
]
IncrementPeriod = Annotated[
    int | None, typer.Option(help="Good steps before it grows. Default: 2000.", show_default=False)
]
Multiplier = Annotated[
    float | None, typer.Option(help="The factor of growth and decrease. Default: 2.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def parse_updates(updates: list[str] | None) -> dict[str, str]:
    """Turn `OUT=IN` options into `{output name: input name}`.

    Raises:
        UpdateError: an option has no `=`, or an output is named twice.
    """
    found: dict[str, str] = {}
    for option in updates or []:
        output, separator, source = option.partition("=")
        if not (output and separator and source):
            raise UpdateError(f"--update {option}: expected OUT=IN, an output's and an input's name")
        if output in found:
            raise UpdateError(f"--update {option}: output {output!r} is named twice")
        found[output] = source
    return found


def parse_loss_scale(
    text: str, initial: float | None, increment_period: int | None, multiplier: float | None
) -> LossScale:
    """Turn the loss-scale options into a loss scale.

    Args:
        text: "dynamic", a number, the name of a preset, or the path of a JSON file with
            `{"class_name": ..., "config": {...}}`.
        initial: overrides `initial_loss_scale`.
        increment_period: overrides `increment_period`.
        multiplier: overrides `multiplier`.

    Raises:
        InvalidLossScaleError: the file cannot be read, or a value is out of range.
    """
    try:
        policy = get(_identifier(text))
    except InvalidLossScaleError as error:
        raise InvalidLossScaleError(f"--loss-scale {text}: {error}") from error
    assert policy is not None
    given = {"initial_loss_scale": initial, "increment_period": increment_period, "multiplier": multiplier}
    overrides = {key: value for key, value in given.items() if value is not None}
    if not overrides:
        return policy
    if not isinstance(policy, DynamicLossScale):
        option = "--" + next(iter(overrides)).replace("_", "-")
        raise InvalidLossScaleError(f"{option} goes with a dynamic loss scale; --loss-scale {text} is fixed")
    if text in _PRESETS:
        return _preset(text, overrides)
    return DynamicLossScale.from_config({**policy.get_config(), **overrides})


_PRESETS = ("torch", "apex", "deepspeed", "megatron", "paddle", "mindspore", "flax", "keras")


def _preset(name: str, options: Any) -> LossScale:
    made: LossScale = getattr(presets, name)(**options)
    return made


def _identifier(text: str) -> Any:
    if text == "dynamic":
        return text
    if text in _PRESETS:
        return _preset(text, {})
    try:
        return float(text)
    except ValueError:
        pass
    if not text.endswith(".json"):
        raise InvalidLossScaleError(
            f"expected dynamic, a number, a preset ({', '.join(_PRESETS)}), or the path of a .json file"
        )
    try:
        config = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidLossScaleError(f"cannot read the file: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidLossScaleError(f"the file is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidLossScaleError('the file must hold {"class_name": ..., "config": {...}}')
    return config
