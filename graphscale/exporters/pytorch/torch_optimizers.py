"""Optimizers as pure functions: those of torch.optim by their own `step`, and functions of a user."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from graphscale.errors import ExportError, one_line

__all__ = ["OTHERS", "FunctionOptimizer", "TorchOptimizer", "make_optimizer"]

Tensor = Any
Tensors = dict[str, Tensor]

_SHARED = "optimizer"  # the prefix of numbers that are one for all weights
_DEFAULT_RATE = 1e-3

# Classes of torch.optim that no graph can have, and why.
_REFUSED = {
    "Adafactor": "its step depends on the values of tensors",
    "LBFGS": "it evaluates the loss several times in a step",
    "Muon": "it computes in bfloat16, for which ONNX Runtime has no kernels on a CPU",
    "SparseAdam": "it takes sparse gradients alone",
}


def _is_optimizer(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


_CLASSES = {name.lower(): kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
# The end of a refusal.
OTHERS = "pass its rule as a function, or one of " + ", ".join(
    repr(name) for name, kind in sorted(_CLASSES.items()) if kind.__name__ not in _REFUSED
)


class TorchOptimizer:
    """An optimizer of torch.optim.

    Args:
        made: an optimizer on copies of the weights.
        names: the names of the weights in the order of its groups.

    Attributes:
        weights: the names of the weights that it updates.
        learning_rate: the learning rate of the first group.
        state: the first values of its state, `{name: tensor}`: `fc1.weight.exp_avg`, and `optimizer.step`.
        is_resumed: whether it has made steps before.
    """

    def __init__(self, made: Any, names: list[str]) -> None:
        self._class, self.weights = type(made), names
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
        self._sizes = [len(group["params"]) for group in made.param_groups]
        self.learning_rate = float(self._groups[0].get("lr", _DEFAULT_RATE))
        if self.learning_rate == 0:
            raise ExportError("the learning rate of the optimizer is 0; give it its first value, a number above 0")
        self._rates = [float(group.get("lr", self.learning_rate)) / self.learning_rate for group in self._groups]
        params = [param for group in made.param_groups for param in group["params"]]
        own = {name: made.state[param] for name, param in zip(names, params, strict=True) if param in made.state}
        self.is_resumed = bool(own)
        self._keys: dict[str, dict[str, str]] = {}
        try:
            self.state = self._first_state(dict(zip(names, params, strict=True)), own)
        except ExportError:
            raise
        except Exception as error:  # whatever its step raises
            raise ExportError(f"{self.label} cannot be exported: {one_line(error)}; {OTHERS}") from error

    @property
    def label(self) -> str:
        """Its class, for a report."""
        prefix = "torch.optim." if self._class.__module__.startswith("torch.optim") else ""
        return f"{prefix}{self._class.__name__}"

    def _first_state(self, params: Tensors, given: Mapping[str, Any]) -> Tensors:
        """Return the state before the next step, and remember the name of each part."""
        fresh = self._make(params)
        for name, param in params.items():
            param.grad = torch.zeros_like(param)
            fresh.state[param].update({k: v for k, v in given.get(name, {}).items() if v is not None})
        first = {name: dict(own) for name, own in self._initialised(fresh, params).items()}
        probe = {name: param.detach().clone() for name, param in params.items()}
        generator = torch.Generator().manual_seed(0)
        gradients = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in probe.items()}
        after = self._step(probe, gradients, first, torch.tensor(self.learning_rate))
        for name, own in after.items():
            for key, value in own.items():
                # PyTorch makes a buffer of momentum from the first gradient: a buffer of zeros gives the same.
                first.setdefault(name, {}).setdefault(key, torch.zeros_like(value))
        self._refuse_dampening(given)
        return self._named(first, after)

    def _refuse_dampening(self, given: Mapping[str, Any]) -> None:
        if not given and any(group.get("momentum") and group.get("dampening") for group in self._groups):
            raise ExportError(
                f"{self.label}: the first step of PyTorch leaves the dampening out, which a graph cannot; pass an "
                "optimizer that has made a step, or dampening=0"
            )

    def _named(self, first: dict[str, dict[str, Tensor]], after: dict[str, dict[str, Tensor]]) -> Tensors:
        """Name each part of the state; a number that is the same for all weights is one."""
        named: Tensors = {}
        for key in dict.fromkeys(key for own in first.values() for key in own):
            owners = [name for name, own in first.items() if key in own]
            is_shared = len(self._groups) == 1 and all(
                values[name][key].dim() == 0 and values[name][key].equal(values[owners[0]][key])
                for name in owners
                for values in (first, after)
            )
            for name in owners:
                label = f"{_SHARED}.{key}" if is_shared else f"{name}.{key}"
                self._keys.setdefault(name, {})[key] = label
                named[label] = first[name][key].detach().clone()
        return named

    @staticmethod
    def _initialised(optimizer: Any, params: Tensors) -> dict[str, dict[str, Tensor]]:
        """Let an optimizer make its state as it does before its first step."""
        if (start := getattr(optimizer, "_init_group", None)) is not None:
            lists = len(inspect.signature(start).parameters) - 1
            with _traceable():
                for group in optimizer.param_groups:
                    start(group, *([] for _ in range(lists)))
        return {name: _tensors(optimizer.state[param]) for name, param in params.items()}

    def _make(self, params: Tensors) -> Any:
        """Make the optimizer on these weights."""
        groups, rest = [], list(params.values())
        for options, size in zip(self._groups, self._sizes, strict=True):
            settings: dict[str, Any] = {"capturable": True, "foreach": False, "fused": None}
            if "step_sizes" in options:  # PyTorch cannot trace the whole number among those of Rprop
                settings["step_sizes"] = tuple(map(float, options["step_sizes"]))
            groups.append({**options, **{k: v for k, v in settings.items() if k in options}, "params": rest[:size]})
            rest = rest[size:]
        return self._class(groups, **_required(self._class))

    def _step(
        self, weights: Tensors, gradients: Tensors, state: Mapping[str, Mapping[str, Tensor]], rate: Tensor
    ) -> dict[str, dict[str, Tensor]]:
        """Let the optimizer step on the weights in place, and return its next state."""
        with _traceable():
            made = self._make(weights)
            for group, factor in zip(made.param_groups, self._rates, strict=True):
                if "lr" in group:
                    group["lr"] = rate if factor == 1 else rate * factor
            for name, weight in weights.items():
                weight.grad = gradients[name]
                made.state[weight].update({key: value.clone() for key, value in state.get(name, {}).items()})
            with torch.no_grad(), _TensorFactors():
                made.step()
            return {name: _tensors(made.state[weight]) for name, weight in weights.items()}

    def __call__(self, gradients: Tensors, weights: Tensors, state: Tensors, rate: Tensor) -> tuple[Tensors, Tensors]:
        """Compute the next weights and the next state."""
        own = {name: {key: state[label] for key, label in keys.items()} for name, keys in self._keys.items()}
        moved = {name: weights[name].detach().clone() for name in self.weights}
        after = self._step(moved, gradients, own, rate)
        labels = {label: after[name][key] for name, keys in self._keys.items() for key, label in keys.items()}
        return moved, labels

    def make_eager(self, weights: Tensors) -> EagerTorch:
        """Return the optimizer as PyTorch itself runs it, on weights that it changes in place."""
        return EagerTorch(self, weights)


class EagerTorch:
    """An optimizer of torch.optim as a training loop of PyTorch uses it."""

    def __init__(self, optimizer: TorchOptimizer, weights: Tensors) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._made = optimizer._make(weights)
        for group, own in zip(self._made.param_groups, optimizer._groups, strict=True):
            group.update({key: own[key] for key in ("capturable", "foreach", "fused", "lr") if key in own})
        for name, keys in optimizer._keys.items() if optimizer.is_resumed else ():
            self._made.state[weights[name]].update({k: optimizer.state[label].clone() for k, label in keys.items()})

    def step(self, gradients: Tensors) -> None:
        """Change the weights by their gradients."""
        for name, weight in self._weights.items():
            weight.grad = gradients[name]
        self._made.step()

    def load(self, state: Tensors) -> None:
        """Change the state, by the names of the exported step; the optimizer may have made none yet."""
        for name, keys in self._optimizer._keys.items():
            own = self._made.state.get(self._weights[name], {})
            own.update({key: state[label].clone() for key, label in keys.items() if key in own})

    def state(self) -> Tensors:
        """Return the state by the names of the exported step."""
        found: Tensors = {}
        for name, keys in self._optimizer._keys.items():
            own = self._made.state[self._weights[name]]
            found |= {label: torch.as_tensor(own[key]) for key, label in keys.items()}
        return found


class FunctionOptimizer:
    """A function `(gradients, weights, state, learning_rate) -> (weights, state)` on dicts of tensors.

    Args:
        function: the function.
        state: its first state.
        names: the names of the weights.
        rate: the learning rate.
    """

    def __init__(
        self, function: Callable[..., Any], state: Mapping[str, Tensor], names: list[str], rate: float
    ) -> None:
        self._function, self.weights, self.learning_rate = function, names, rate
        self.state = {str(name): torch.as_tensor(value).detach().clone() for name, value in state.items()}

    @property
    def label(self) -> str:
        """Its name, for a report."""
        return f"the function {getattr(self._function, '__name__', type(self._function).__name__)}"

    def __call__(self, gradients: Tensors, weights: Tensors, state: Tensors, rate: Tensor) -> tuple[Tensors, Tensors]:
        """Compute the next weights and the next state.

        Raises:
            ExportError: the function returns something else.
        """
        results = self._function(dict(gradients), {name: weights[name] for name in self.weights}, dict(state), rate)
        if not (isinstance(results, tuple) and len(results) == 2 and all(isinstance(r, Mapping) for r in results)):
            raise ExportError(f"{self.label} must return two dicts, the next weights and the next state")
        for what, given, got in (("weights", self.weights, results[0]), ("state", self.state, results[1])):
            if set(given) != set(got):
                odd = sorted(set(given) ^ set(got))[0]
                raise ExportError(f"{self.label} must return {what} of the names that it gets; {odd!r} differs")
        return dict(results[0]), dict(results[1])

    def make_eager(self, weights: Tensors) -> EagerFunction:
        """Return the optimizer as a loop of PyTorch would use it."""
        return EagerFunction(self, weights)


class EagerFunction:
    """A function as optimizer in a training loop of PyTorch."""

    def __init__(self, optimizer: FunctionOptimizer, weights: Tensors) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._state = {name: value.clone() for name, value in optimizer.state.items()}

    def step(self, gradients: Tensors) -> None:
        """Change the weights by their gradients."""
        rate = torch.tensor(self._optimizer.learning_rate)
        with torch.no_grad():
            current = {name: weight.detach().clone() for name, weight in self._weights.items()}
            weights, self._state = self._optimizer(gradients, current, self._state, rate)
            for name, weight in self._weights.items():
                weight.copy_(weights[name])

    def load(self, state: Tensors) -> None:
        """Change the state."""
        self._state = {name: state[name] for name in self._state}

    def state(self) -> Tensors:
        """Return the state by the names of the exported step."""
        return self._state


def make_optimizer(optimizer: Any, weights: Tensors, originals: Mapping[int, str]) -> Any:
    """Make the optimizer that `export_step` was given.

    Args:
        optimizer: a name, a class, an optimizer, a function, or a class or function with a dict.
        weights: copies of the trainable parameters by name.
        originals: the name of each parameter of the user's module, by its identity.

    Raises:
        ExportError: it is none of these.
    """
    options: Any = {}
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and isinstance(optimizer[1], Mapping):
        optimizer, options = optimizer
    if isinstance(optimizer, functools.partial) and not optimizer.args and inspect.isclass(optimizer.func):
        optimizer, options = optimizer.func, {**optimizer.keywords, **options}
    if isinstance(optimizer, str):
        if optimizer.lower() not in _CLASSES:
            raise ExportError(f"torch.optim has no optimizer {optimizer!r}; {OTHERS}")
        optimizer = _CLASSES[optimizer.lower()]
    kind = optimizer if inspect.isclass(optimizer) else type(optimizer)
    if kind.__name__ in _REFUSED and kind.__module__.startswith("torch.optim"):
        raise ExportError(f"torch.optim.{kind.__name__} cannot be exported: {_REFUSED[kind.__name__]}; {OTHERS}")
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, weights, originals)
    if _is_optimizer(optimizer):
        copies = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        try:
            made = optimizer(list(copies.values()), **options)
        except (TypeError, ValueError) as error:
            raise ExportError(f"{optimizer.__name__} refuses its options: {error}") from error
        return TorchOptimizer(made, list(weights))
    if not callable(optimizer):
        raise ExportError(
            f"the optimizer is {optimizer!r}; pass 'adamw', 'sgd', (torch.optim.AdamW, {{'lr': 1e-3}}), an optimizer, "
            "or a function"
        )
    return FunctionOptimizer(optimizer, options, list(weights), _DEFAULT_RATE)


def _of_instance(optimizer: Any, weights: Tensors, originals: Mapping[int, str]) -> TorchOptimizer:
    """Copy an optimizer of the user, with its state."""
    names, groups, copies = [], [], {}
    for group in optimizer.param_groups:
        held = []
        for param in group["params"]:
            if (name := originals.get(id(param))) is None:
                raise ExportError("the optimizer updates a tensor that is no parameter of the module; pass its own")
            if name in weights:
                names.append(name)
                copies[name] = torch.nn.Parameter(weights[name].detach().clone())
                held.append(copies[name])
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": held})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ExportError("the optimizer updates no parameter that gets a gradient")
    made = type(optimizer)(groups, **_required(type(optimizer)))
    for param, own in optimizer.state.items():
        if (name := originals.get(id(param))) in copies:
            made.state[copies[name]] = {k: _cloned(v) for k, v in own.items()}
    return TorchOptimizer(made, names)


def _required(kind: Any) -> dict[str, Any]:
    """Return values for the arguments that a class needs; each group has its own."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return {name: _DEFAULT_RATE for name in needed if name == "lr"}


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


@contextlib.contextmanager
def _traceable() -> Iterator[None]:
    """Let optimizers keep their counters in tensors, as they do where PyTorch compiles them."""
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        yield


class _TensorFactors(TorchFunctionMode):  # type: ignore[misc]
    """Accepts tensors as the factors `alpha` and `value` of operators, which take numbers."""

    _FACTORS = (("add", "alpha"), ("sub", "alpha"), ("addcmul", "value"), ("addcdiv", "value"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        key = dict(self._FACTORS).get(getattr(func, "__name__", "").rstrip("_"))
        if key is not None and isinstance(kwargs.get(key), torch.Tensor):
            factor = kwargs.pop(key)
            args = (args[0], args[1] * factor, *args[2:])
        return func(*args, **kwargs)
