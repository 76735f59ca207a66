"""The loss-scale policies: TensorFlow's `LossScale`, `FixedLossScale` and `DynamicLossScale`, on numpy alone.

Words and behaviour are those of `tf.compat.v1.mixed_precision`: calling an instance gives the loss scale as a float32
scalar, `update(grads)` adjusts it from gradients *already divided by the scale*. Used eagerly, an instance holds its
own state; `bind` puts the same policy, with its state, into an ONNX graph.
"""

from __future__ import annotations

import abc
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np

from graphscale.errors import InvalidLossScaleError

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphscale.bound import BoundLossScale

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "get"]

# The largest count of steps that a float32 counter holds exactly: the in-place targets keep one.
MAX_INCREMENT_PERIOD = 2**24


class LossScale(abc.ABC):
    """Base class of all loss scales.

    Loss scaling multiplies the loss by the loss scale and divides each gradient by it. Mathematically it has no
    effect; in float16 it keeps small intermediate gradients from underflowing.
    """

    @abc.abstractmethod
    def __call__(self) -> np.float32:
        """Return the current loss scale, a float32 scalar."""

    @abc.abstractmethod
    def update(self, grads: Any) -> tuple[None, bool]:
        """Update the loss scale from unscaled gradients.

        Args:
            grads: arrays of any shape and floating-point dtype, nested in sequences and mappings in any way. They
                must already be divided by the loss scale. None in place of an array is ignored.

        Returns:
            `(None, should_apply_gradients)`. If the second is False, the caller must skip this step.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, from which `from_config` makes an equal loss scale."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Create the loss scale from its config.

        Raises:
            InvalidLossScaleError: (a ValueError) a key is unknown or missing, or a value is out of range.
        """
        try:
            return cls(**config)
        except TypeError as error:
            keys = ", ".join(list(inspect.signature(cls).parameters))
            raise InvalidLossScaleError(
                f"bad config for {cls.__name__}: its keys are {keys}; got {', '.join(map(repr, config))}"
            ) from error

    def bind(self, graph: ir.Graph | ir.Model, target: str = "onnx") -> BoundLossScale:
        """Create this loss scale's state in `graph`, and return the loss scale in graph mode.

        Args:
            graph: the main graph of a model, or the model itself; the state is added to it as initializers that are
                also graph inputs.
            target: the runtime that shall execute the graph (see `graphscale.targets`).

        Returns:
            `bound`: `bound()` is the scale, a scalar float32 value of the graph, and `bound.update(grads)` returns
            `(update_op, should_apply_gradients)`, the node that writes the new state and a scalar bool value.
        """
        from graphscale.bound import BoundLossScale

        return BoundLossScale(self, graph, target)

    def to_json(self) -> str:
        """Return `{"class_name": ..., "config": {...}}` as JSON; `get` accepts the parsed form."""
        return json.dumps({"class_name": type(self).__name__, "config": self.get_config()})


class FixedLossScale(LossScale):
    """Loss scale with a fixed value.

    Args:
        loss_scale_value: the scale, a number of at least 1 that float32 can hold.

    Raises:
        ValueError: the value is not a number, or below 1, NaN or infinite.
    """

    def __init__(self, loss_scale_value: float) -> None:
        self._loss_scale_value = _number("loss_scale_value", loss_scale_value, minimum=1.0)

    def __call__(self) -> np.float32:
        """Return the loss scale, a float32 scalar: always the same."""
        return np.float32(self._loss_scale_value)

    def update(self, grads: Any) -> tuple[None, bool]:
        """Return `(None, True)`: a fixed scale cannot adjust itself, not even to NaN gradients."""
        del grads
        return None, True

    def get_config(self) -> dict[str, Any]:
        """Return `{"loss_scale_value": ...}`."""
        return {"loss_scale_value": self._loss_scale_value}

    def __repr__(self) -> str:
        return f"FixedLossScale({self._loss_scale_value})"


class DynamicLossScale(LossScale):
    """Loss scale that adjusts itself.

    Every `increment_period` consecutive steps with finite gradients the scale is multiplied by `multiplier`, unless
    the product overflows float32. After a step with a non-finite gradient it is divided by `multiplier`, but never
    below 1, and that step is to be skipped.

    Args:
        initial_loss_scale: the scale at the beginning, at least 1.
        increment_period: good steps in a row before the scale grows, from 1 to 2**24.
        multiplier: the factor of growth and of decrease, more than 1.

    Raises:
        ValueError: an argument is out of its range. TensorFlow does not check; a NaN here would never be noticed.
    """

    def __init__(
        self, initial_loss_scale: float = 2**15, increment_period: int = 2000, multiplier: float = 2.0
    ) -> None:
        self._initial_loss_scale = _number("initial_loss_scale", initial_loss_scale, minimum=1.0)
        self._increment_period = _period(increment_period)
        self._multiplier = _number("multiplier", multiplier, above=1.0)
        self._current_loss_scale = np.float32(self._initial_loss_scale)
        self._num_good_steps = 0

    @property
    def initial_loss_scale(self) -> float:
        """The loss scale at the beginning."""
        return self._initial_loss_scale

    @property
    def increment_period(self) -> int:
        """Consecutive good steps after which the loss scale grows."""
        return self._increment_period

    @property
    def multiplier(self) -> float:
        """The factor by which the loss scale grows and shrinks."""
        return self._multiplier

    @property
    def num_good_steps(self) -> int:
        """Consecutive good steps since the loss scale changed last."""
        return self._num_good_steps

    def __call__(self) -> np.float32:
        """Return the current loss scale, a float32 scalar."""
        return self._current_loss_scale

    def update(self, grads: Any) -> tuple[None, bool]:
        """Adjust the loss scale by whether all gradients are finite; no gradients count as finite."""
        finite = all(_is_all_finite(gradient) for gradient in _flatten(grads))
        with np.errstate(over="ignore"):
            self._step(finite)
        return None, finite

    def _step(self, finite: bool) -> None:
        multiplier = np.float32(self._multiplier)
        if not finite:
            self._num_good_steps = 0
            self._current_loss_scale = max(self._current_loss_scale / multiplier, np.float32(1))
        elif self._num_good_steps + 1 >= self._increment_period:
            self._num_good_steps = 0
            grown = self._current_loss_scale * multiplier
            if np.isfinite(grown):
                self._current_loss_scale = grown
        else:
            self._num_good_steps += 1

    def get_config(self) -> dict[str, Any]:
        """Return the three arguments of the constructor. The state is no part of it."""
        return {
            "initial_loss_scale": self._initial_loss_scale,
            "increment_period": self._increment_period,
            "multiplier": self._multiplier,
        }

    def __repr__(self) -> str:
        return (
            f"DynamicLossScale(current_loss_scale={float(self._current_loss_scale)}, "
            f"num_good_steps={self._num_good_steps}, initial_loss_scale={self._initial_loss_scale}, "
            f"increment_period={self._increment_period}, multiplier={self._multiplier})"
        )


def get(identifier: Any) -> LossScale | None:
    """Return the loss scale that `identifier` stands for.

    Args:
        identifier: a number (a `FixedLossScale`), "dynamic", a `LossScale`, a config
            `{"class_name": ..., "config": {...}}`, or None (returned as it is).

    Raises:
        InvalidLossScaleError: (a ValueError) it is none of these.
    """
    if identifier is None or isinstance(identifier, LossScale):
        return identifier
    if isinstance(identifier, int | float | np.integer | np.floating) and not isinstance(identifier, bool):
        return FixedLossScale(identifier)  # type: ignore[arg-type]
    if isinstance(identifier, str) and identifier == "dynamic":
        return DynamicLossScale()
    if isinstance(identifier, Mapping):
        return _from_config(identifier)
    raise InvalidLossScaleError(
        f"cannot read {identifier!r} as a loss scale; pass 'dynamic', a number of at least 1, a LossScale, "
        'or {"class_name": ..., "config": {...}}'
    )


def _from_config(identifier: Mapping[str, Any]) -> LossScale:
    classes: dict[str, type[LossScale]] = {c.__name__: c for c in (FixedLossScale, DynamicLossScale)}
    name, config = identifier.get("class_name"), identifier.get("config", {})
    known = isinstance(name, str) and name in classes and not set(identifier) - {"class_name", "config"}
    if not known or not isinstance(config, Mapping):
        raise InvalidLossScaleError(
            f'a loss scale config is {{"class_name": "FixedLossScale" or "DynamicLossScale", "config": {{...}}}}; '
            f"got {dict(identifier)!r}"
        )
    return classes[str(name)].from_config(config)


def _number(name: str, value: Any, *, minimum: float = -math.inf, above: float = -math.inf) -> float:
    """Return a number that float32 can hold, within the bounds also after rounding to float32."""
    wanted = f"a finite float32 number of at least {minimum:g}"
    if above > minimum:
        wanted = f"a finite float32 number above {above:g}, such as {2 * above:g}"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidLossScaleError(f"{name} must be {wanted}; got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore"):
        held = np.float32(number)
    if not (np.isfinite(held) and number >= minimum and held > above):
        raise InvalidLossScaleError(f"{name} must be {wanted}; got {value!r}")
    return number


def _period(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidLossScaleError(f"increment_period must be a whole number of steps; got {value!r}")
    if not 1 <= value <= MAX_INCREMENT_PERIOD:
        raise InvalidLossScaleError(f"increment_period must be from 1 to 2**24 steps; got {value!r}")
    return int(value)


def _flatten(grads: Any) -> Iterator[Any]:
    if grads is None:
        return
    if isinstance(grads, Mapping):
        grads = list(grads.values())
    if isinstance(grads, Sequence) and not isinstance(grads, str | bytes):
        for item in grads:
            yield from _flatten(item)
    else:
        yield grads


def _is_all_finite(gradient: Any) -> bool:
    array = np.asarray(gradient)
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype in _ML_FLOATS):
        raise TypeError(f"a gradient must be an array of a floating-point dtype; got {array.dtype}")
    return bool(np.isfinite(array).all())


_ML_FLOATS = {
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
}
