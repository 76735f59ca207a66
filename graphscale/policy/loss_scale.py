"""The loss-scale policies: TensorFlow's `LossScale`, `FixedLossScale` and `DynamicLossScale`, on numpy alone.

Names and behaviour are those of `tf.compat.v1.mixed_precision`: calling an instance gives the loss scale as a float32
scalar, `update(grads)` adjusts it from gradients *already divided by the scale*. Used eagerly, an instance holds its
own state; `bind` puts the same policy, with its state, into an ONNX graph.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from graphscale.errors import InvalidLossScaleError
from graphscale.policy.dynamic_rule import DynamicRule, check_number

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["DynamicLossScale", "FixedLossScale", "GraphLossScale", "LossScale", "get", "get_policy"]


class GraphLossScale(Protocol):
    """A loss scale in graph mode: the names of `LossScale`, with values of the graph in place of arrays."""

    @property
    def good_steps(self) -> ir.Value | None:
        """The count of good steps, a scalar initializer and graph input; None for a fixed loss scale."""

    def __call__(self) -> ir.Value:
        """Return the current loss scale, a scalar float32 value of the graph."""

    def update(self, grads: Any) -> tuple[ir.Node | None, ir.Value | bool]:
        """Add the nodes that update the loss scale, and return `(update_op, should_apply_gradients)`."""

    def order_writes(self) -> bool:
        """Make in-place writes wait for all readers of the old values; return whether the graph has changed."""


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
        """Return the constructor's arguments, for `from_config`."""

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

    def bind(self, graph: ir.Graph | ir.Model, target: str = "onnx") -> GraphLossScale:
        """Create this loss scale's state in `graph`, and return the loss scale in graph mode.

        Args:
            graph: the main graph of a model, or the model itself; the state is added to it as initializers that are
                also graph inputs.
            target: the runtime that executes the graph (see `graphscale.targets`).

        Returns:
            `bound`: `bound()` is the scale, a scalar float32 value of the graph, and `bound.update(grads)` returns
            `(update_op, should_apply_gradients)`, the node that writes the new state and a scalar bool value.
        """
        # Policies need numpy alone. A policy in a graph is a pass's work, which is imported at the call.
        bound: GraphLossScale = importlib.import_module("graphscale.passes.bound").BoundLossScale(self, graph, target)
        return bound

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
        self._loss_scale_value = check_number("loss_scale_value", loss_scale_value, minimum=1.0)

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
    below 1, and that step is to be skipped. This is TensorFlow's rule; the keyword options make it that of its peers,
    and `graphscale.policy.presets` names them.

    Args:
        initial_loss_scale: the scale at the beginning, at least `min_loss_scale`.
        increment_period: good steps in a row before the scale grows, from 1 to 2**24.
        multiplier: the factor of growth and of decrease, more than 1.
        growth_factor: the factor of growth, more than 1; None for `multiplier`.
        backoff_factor: the factor of a decrease, less than 1; None to divide by `multiplier`.
        min_loss_scale: the lowest value of the scale; 0 for no floor.
        max_loss_scale: the limit of a growth; None for no limit: then a growth that overflows float32 is left out.
        growth_delay: good steps that a growth takes beyond `increment_period`: "none"; "always" one more; "first"
            one more for the first growth after the beginning and after each non-finite step.
        hysteresis: number of non-finite steps that lower the scale, from 1 to 2**24.
        hysteresis_refill: the event that restarts this count: "growth", a growth of the scale, so that until then each
            further non-finite step lowers it; "good", each good step, so that only steps in a row count; "decrease",
            each good step and each decrease.
        max_consecutive_skips: the number of non-finite steps in a row after which the scale is stuck; None for no
            limit.
        on_stuck: the reaction to a stuck scale: at a non-finite step that should lower it while it is
            `min_loss_scale` already, or by `max_consecutive_skips`. "hold" skips as always; "flag" also reports it
            (`stuck`, in a graph the output `stuck`); "stop" is "flag" for a run that should end there; "reset" goes
            back to the beginning; "accept" applies the step. `graphscale train` ends at "flag" and "stop".
        arithmetic: "float32", or "float64": the scale times or over the factor is computed in float64 and rounded.

    Attributes:
        stuck: True if the last update found the scale stuck.

    Raises:
        ValueError: an argument is out of its range. TensorFlow does not check; a NaN here would never be noticed.
    """

    def __init__(
        self,
        initial_loss_scale: float = 2**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
        *,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        growth_delay: str = "none",
        hysteresis: int = 1,
        hysteresis_refill: str = "growth",
        max_consecutive_skips: int | None = None,
        on_stuck: str = "hold",
        arithmetic: str = "float32",
    ) -> None:
        given = locals()
        self.rule = DynamicRule(**{field.name: given[field.name] for field in dataclasses.fields(DynamicRule)})
        self.state = self.rule.initial_state()
        self.stuck = False

    @property
    def initial_loss_scale(self) -> float:
        """The loss scale at the beginning."""
        return self.rule.initial_loss_scale

    @property
    def increment_period(self) -> int:
        """Consecutive good steps after which the loss scale grows."""
        return self.rule.increment_period

    @property
    def multiplier(self) -> float:
        """The factor by which the loss scale grows and shrinks."""
        return self.rule.multiplier

    @property
    def num_good_steps(self) -> int:
        """Consecutive good steps since the loss scale changed last; -1 where the next growth takes one more."""
        return self.state.good_steps

    def __call__(self) -> np.float32:
        """Return the current loss scale, a float32 scalar."""
        return self.state.loss_scale

    def update(self, grads: Any) -> tuple[None, bool]:
        """Adjust the loss scale to gradients, finite or not; no gradients count as finite."""
        from graphscale.policy.eager import are_finite, next_state  # graphs have the rule as nodes

        finite = are_finite(grads)
        self.state, self.stuck = next_state(self.rule, self.state, finite)
        return None, finite or (self.stuck and self.rule.on_stuck == "accept")

    def get_config(self) -> dict[str, Any]:
        """Return the first three arguments of the constructor, and the others that differ from their defaults.

        The config has no state.
        """
        config = dataclasses.asdict(self.rule)
        return {key: value for key, value in config.items() if key in _TENSORFLOW or value != _DEFAULTS[key]}

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.get_config().items() if key not in _TENSORFLOW)
        # TensorFlow prints the arguments as Python numbers, and the scale as its float32 variable holds it.
        return (
            f"DynamicLossScale(current_loss_scale={self()!s}, num_good_steps={self.num_good_steps}, "
            f"initial_loss_scale={self.initial_loss_scale}, increment_period={self.increment_period}, "
            f"multiplier={self.multiplier}{options})"
        )


_TENSORFLOW = ("initial_loss_scale", "increment_period", "multiplier")
_DEFAULTS = dataclasses.asdict(DynamicRule())


def get(identifier: Any) -> LossScale | None:
    """Return the loss scale for an identifier.

    Args:
        identifier: a number (a `FixedLossScale`), "dynamic", a `LossScale`, a config
            `{"class_name": ..., "config": {...}}`, or None, which is returned.

    Raises:
        InvalidLossScaleError: (a ValueError) the identifier is none of these.
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


def get_policy(identifier: Any) -> LossScale:
    """Return the loss scale for an identifier, as `get` does, but refuse None."""
    policy = get(identifier)
    if policy is None:
        raise InvalidLossScaleError("a loss scale is needed: 'dynamic', a number of at least 1, or a config")
    return policy


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
