"""Feeds apart from the data: constants, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphscale.errors import TrainingError, reporting
from graphscale.files.contents import open_file
from graphscale.files.tensor_files import NUMPY_ERRORS

if TYPE_CHECKING:
    from graphscale.session import InputSpec

__all__ = ["check_fed", "find_rate_input", "parse_feeds"]

RATE_NAMES = ("learning_rate", "lr")
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


def parse_feeds(options: Sequence[str], inputs: Mapping[str, InputSpec]) -> dict[str, np.ndarray[Any, Any]]:
    """Turn `NAME=VALUE` options into arrays for these inputs.

    The value is a number, true or false, for an input of one element; or the path of an .npy file.

    Raises:
        TrainingError: an option is malformed, names no input, or its value does not fit the input.
    """
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not (name and separator and text):
            raise TrainingError(f"--feed {option}: expected NAME=VALUE, a number, true, false, or an .npy file")
        if name not in inputs:
            raise TrainingError(f"--feed {option}: the step is fed {', '.join(inputs) or 'nothing'}, not {name!r}")
        if name in feeds:
            raise TrainingError(f"--feed {option}: {name!r} is given twice")
        parse = _from_file if text.endswith(".npy") else _from_number
        feeds[name] = parse(option, text, inputs[name])
    return feeds


def find_rate_input(name: str | None, inputs: Mapping[str, InputSpec], fed: Sequence[str]) -> str | None:
    """Return the input for the learning rate, or None.

    Args:
        name: the input that the user named; None to find a floating-point input of shape [] or [1] called learning_rate
            or lr.
        inputs: the inputs of the step.
        fed: the inputs that data or constants feed.

    Raises:
        TrainingError: the named input does not exist, is fed otherwise, or is no floating-point scalar.
    """
    if name is None:
        free = (name for name in RATE_NAMES if name in inputs and name not in fed)
        return next((name for name in free if _is_rate(inputs[name])), None)
    if name not in inputs:
        raise TrainingError(f"--learning-rate-input {name}: the step is fed {', '.join(inputs) or 'nothing'}")
    if name in fed:
        raise TrainingError(f"--learning-rate-input {name}: the data or --feed feeds this input already")
    if not _is_rate(inputs[name]):
        spec = inputs[name]
        raise TrainingError(
            f"--learning-rate-input {name}: expected a floating-point scalar, but it is {spec.dtype}{list(spec.shape)}"
        )
    return name


def check_fed(inputs: Mapping[str, InputSpec], arrays: Sequence[str], constants: Sequence[str], source: str) -> None:
    """Check that every input is fed by exactly one source.

    Args:
        inputs: the inputs of the step.
        arrays: the arrays of the data.
        constants: the inputs that `--feed` or the learning rate feeds.
        source: the file of the data, for messages.

    Raises:
        TrainingError: an input is missing, or fed twice.
    """
    for name in constants:
        if name in arrays:
            raise TrainingError(f"--feed {name}: {source} has an array of this name as well")
    for name, spec in inputs.items():
        if name not in arrays and name not in constants and not spec.optional:
            raise TrainingError(
                f"the step needs {name!r} ({spec.dtype}{list(spec.shape)}), which {source} does not have; add the "
                f"array, or give a constant with --feed {name}=VALUE"
            )


def _is_rate(spec: InputSpec) -> bool:
    floating = spec.dtype.kind == "f" or spec.dtype.name == "bfloat16"
    return floating and tuple(spec.shape) in ((), (1,))


def _from_number(option: str, text: str, spec: InputSpec) -> np.ndarray[Any, Any]:
    if any(size != 1 for size in spec.shape):
        raise TrainingError(
            f"--feed {option}: the input has the shape {list(spec.shape)}; give an array as NAME=FILE.npy, or put "
            "values of the samples into the data"
        )
    try:
        if spec.dtype.kind == "b":
            value: Any = _FLAGS[text.lower()]
        else:
            value = int(text) if spec.dtype.kind in "iu" else float(text)
        if math.isnan(value):
            raise TrainingError(f"--feed {option}: NaN would spread to the weights; give a number")
        return np.full([1] * len(spec.shape), value, dtype=spec.dtype)
    except (KeyError, ValueError, OverflowError) as error:
        raise TrainingError(f"--feed {option}: {text!r} is no {spec.dtype}") from error


def _from_file(option: str, path: str, spec: InputSpec) -> np.ndarray[Any, Any]:
    damaged = reporting(TrainingError, f"--feed {option}: {path} is damaged, or no .npy file", *NUMPY_ERRORS)
    with damaged, reporting(TrainingError, f"--feed {option}: cannot read {path}"):
        array = np.load(open_file(path)[0], allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise TrainingError(f"--feed {option}: {path} is no .npy file of one array")
    problem = spec.find_misfit(array.dtype, array.shape)
    if problem is not None:
        raise TrainingError(f"--feed {option}: the array in {path} {problem}")
    return array
