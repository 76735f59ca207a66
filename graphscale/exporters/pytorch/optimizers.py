"""Update rules of a step: torch.optim's own classes, run on tensors by name, or functions of the user."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from graphscale.errors import ExportError, one_line

__all__ = ["FunctionRule", "TorchRule", "UpdateRule", "make_rule"]

Tensors = dict[str, Any]
Groups = list[tuple[tuple[str, ...], dict[str, Any]]]
_NAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


class UpdateRule:
    """A rule from weights and gradients to the next weights, with a state.

    Attributes:
        learning_rate: the rate that the user chose; the step reads a fed one.
        text: the rule in words.
    """

    learning_rate = 1e-3
    text = ""

    def initialize(self, weights: Tensors) -> Tensors:
        """Return the first state."""
        raise NotImplementedError

    def update(self, gradients: Tensors, weights: Tensors, state: Tensors, rate: Any) -> tuple[Tensors, Tensors]:
        """Return the next weights and the next state."""
        raise NotImplementedError


class FunctionRule(UpdateRule):
    """The rule of a user's two functions."""

    def __init__(self, initialize: Callable[..., Any], update: Callable[..., Any]) -> None:
        self._initialize, self._update = initialize, update
        self.text = getattr(update, "__name__", "a function")

    def initialize(self, weights: Tensors) -> Tensors:
        """Return the first state."""
        return _check_tensors(self._initialize(dict(weights)), "the first state of the optimizer")

    def update(self, gradients: Tensors, weights: Tensors, state: Tensors, rate: Any) -> tuple[Tensors, Tensors]:
        """Return the next weights and the next state."""
        result = self._update(dict(gradients), dict(weights), dict(state), rate)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ExportError("the optimizer's update function must return a pair: the next weights, the next state")
        moved, following = (_check_tensors(part, "the result of the optimizer") for part in result)
        if set(moved) != set(weights) or set(following) != set(state):
            raise ExportError("the optimizer's update function must return every weight and every state by its name")
        return moved, following


class TorchRule(UpdateRule):
    """The rule of a class of torch.optim.

    Attributes:
        kind: the class.
        groups: names of weights with the options of their group.
        trained: the state of an optimizer that has trained already, by weight.
    """

    def __init__(
        self,
        kind: Any,
        groups: Groups,
        trained: Mapping[str, Tensors] | None = None,
    ) -> None:
        self.kind, self.groups, self.trained = kind, groups, dict(trained or {})
        probe = self._make({name: torch.zeros(1) for names, _ in groups for name in names})
        rates = [float(group["lr"]) for group in probe.param_groups]
        self.learning_rate = rates[0]
        if not self.learning_rate > 0:
            raise ExportError(f"{kind.__name__}: the learning rate of the first group must be positive, not {rates[0]}")
        self._ratios = [rate / self.learning_rate for rate in rates]
        self.text = kind.__name__

    def _make(self, weights: Tensors, **settings: Any) -> Any:
        """Make the optimizer on weights by name."""
        groups = [
            {"params": [weights[name] for name in names], **options, **settings} for names, options in self.groups
        ]
        try:
            return self.kind(groups)
        except (TypeError, ValueError, AssertionError) as error:
            raise ExportError(f"{self.kind.__name__} does not take these options: {one_line(error)}") from error

    def initialize(self, weights: Tensors) -> Tensors:
        """Return the state before the first step, or that of the trained optimizer, as `WEIGHT.KEY`."""
        params = {name: weight.detach().clone() for name, weight in weights.items()}
        pristine = self._states_after(params, computes=False)
        moved = self._states_after(params, computes=True)
        found: Tensors = {}
        for name in params:
            # A momentum buffer that the first step makes begins at zero.
            keys = {key: torch.zeros_like(value) for key, value in moved[name].items()} | pristine[name]
            keys |= {key: value for key, value in self.trained.get(name, {}).items() if key in keys}
            found |= {f"{name}.{key}": value for key, value in keys.items()}
        return found

    def _states_after(self, weights: Tensors, computes: bool) -> dict[str, Tensors]:
        """Return the state of each weight after a step without gradients, with or without its computation."""
        params = {name: weight.clone() for name, weight in weights.items()}
        made = self._make(params)
        for param in params.values():
            param.grad = torch.zeros_like(param)
        with contextlib.nullcontext() if computes else _without_computation(self.kind):
            made.step()
        return {name: _tensors(made.state[param]) for name, param in params.items()}

    def update(self, gradients: Tensors, weights: Tensors, state: Tensors, rate: Any) -> tuple[Tensors, Tensors]:
        """Run the optimizer's own step on tensors, which may be traced."""
        params = {name: weight.detach().clone() for name, weight in weights.items()}
        settings = {"foreach": False, "fused": None, "capturable": True}
        known = inspect.signature(self.kind).parameters
        made = self._make(params, **{key: value for key, value in settings.items() if key in known})
        for group, ratio in zip(made.param_groups, self._ratios, strict=True):
            group["lr"] = rate if ratio == 1 else rate * ratio
        for name, param in params.items():
            param.grad = gradients[name]
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}
            if own:
                made.state[param] = {key: value for key, value in own.items() if "." not in key}
        # Counters and rates stay tensors where PyTorch compiles.
        with mock.patch("torch.compiler.is_compiling", return_value=True), _TensorFactors():
            made.step()
        following = {
            f"{name}.{key}": value
            for name, param in params.items()
            for key, value in _tensors(made.state[param]).items()
        }
        return params, {key: following.get(key, state[key]) for key in state}


class _TensorFactors(TorchFunctionMode):  # type: ignore[misc]
    """Products in place of factors that are tensors: `add_(x, alpha=rate)` reads the rate as a Python number."""

    _FACTORS = ("alpha", "value")
    _METHODS = ("add", "sub", "addcmul", "addcdiv")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "").rstrip("_") in self._METHODS:
            for key in self._FACTORS:
                if isinstance(kwargs.get(key), torch.Tensor):
                    args = (args[0], args[1] * kwargs.pop(key), *args[2:])
        return function(*args, **kwargs)


@contextlib.contextmanager
def _without_computation(kind: Any) -> Iterator[None]:
    """Leave out the functional part of an optimizer of torch.optim: its step makes the state, and nothing else."""
    with contextlib.ExitStack() as stack:
        for base in kind.__mro__:
            module, name = sys.modules.get(base.__module__), base.__name__.lower()
            if base.__module__.startswith("torch.optim") and callable(getattr(module, name, None)):
                stack.enter_context(mock.patch.object(module, name, return_value=None))
        yield


def make_rule(optimizer: Any, weights: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of an optimizer as `export_step` takes it; `weights` are the module's parameters by name.

    Raises:
        ExportError: it is none of these.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMES:
            raise ExportError(f"there is no optimizer {optimizer!r}; name one of {', '.join(_NAMES)}, or pass a class")
        optimizer = _NAMES[optimizer]
    if isinstance(optimizer, functools.partial) and not optimizer.args:
        optimizer = (optimizer.func, optimizer.keywords)
    if inspect.isclass(optimizer):
        optimizer = (optimizer, {})
    if isinstance(optimizer, torch.optim.Optimizer):
        return _rule_of_instance(optimizer, weights)
    if isinstance(optimizer, tuple) and len(optimizer) == 2:
        first, second = optimizer
        if inspect.isclass(first) and issubclass(first, torch.optim.Optimizer) and isinstance(second, Mapping):
            _refuse_closures(first)
            return TorchRule(first, [(tuple(weights), dict(second))])
        if callable(first) and callable(second):
            return FunctionRule(first, second)
    raise ExportError(
        "the optimizer must be 'adamw', 'sgd', a class of torch.optim, a pair of a class and its options, an optimizer "
        f"of the module's parameters, or a pair of functions (initialize, update); got {type(optimizer).__name__}"
    )


def _rule_of_instance(optimizer: Any, weights: Mapping[str, Any]) -> TorchRule:
    _refuse_closures(type(optimizer))
    names = {id(weight): name for name, weight in weights.items()}
    groups, seen = [], set()
    known = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.requires_grad]
        own = tuple(names[id(param)] for param in params if id(param) in names)
        if len(own) < len(params):
            raise ExportError("the optimizer has a parameter that the module does not have; make it of this module's")
        seen |= set(own)
        groups.append((own, {key: value for key, value in group.items() if key in known and key != "params"}))
    missing = [name for name in weights if name not in seen]
    if missing:
        raise ExportError(f"the optimizer leaves out {missing[0]}: add it, or set its requires_grad to False")
    trained = {names[id(param)]: _tensors(state) for param, state in optimizer.state.items() if id(param) in names}
    return TorchRule(type(optimizer), [group for group in groups if group[0]], trained)


def _refuse_closures(kind: Any) -> None:
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ExportError(f"{kind.__name__} calls the loss several times in a step, which no graph of one step can do")


def _tensors(state: Mapping[str, Any]) -> Tensors:
    return {key: value.detach() for key, value in state.items() if isinstance(value, torch.Tensor)}


def _check_tensors(values: Any, what: str) -> Tensors:
    if not isinstance(values, Mapping) or not all(isinstance(v, torch.Tensor) for v in values.values()):
        raise ExportError(f"{what} must be a mapping from names to tensors")
    return dict(values)
