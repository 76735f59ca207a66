"""Kinds that are the optimizers of torch.optim themselves, traced: their own order of operations."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from models.zoo.pytorch.problems import Problem, classification, regression, square
from models.zoo.pytorch.training import differentiate
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

# No exporter traces Adagrad, Adafactor, SparseAdam and LBFGS: they compute with Python's numbers. `rules` has formulas.
OPTIMIZERS = {
    "torch-sgd": (torch.optim.SGD, [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}]),
    "torch-adam": (torch.optim.Adam, [{}, {"amsgrad": True}, {"weight_decay": 0.01, "maximize": True}]),
    "torch-adamw": (torch.optim.AdamW, [{}, {"amsgrad": True}]),
    "torch-adamax": (torch.optim.Adamax, [{}]),
    "torch-nadam": (torch.optim.NAdam, [{}, {"weight_decay": 0.01, "decoupled_weight_decay": True}]),
    "torch-radam": (torch.optim.RAdam, [{}]),
    "torch-adadelta": (torch.optim.Adadelta, [{}]),
    "torch-rmsprop": (torch.optim.RMSprop, [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}]),
    "torch-rprop": (torch.optim.Rprop, [{"step_sizes": (1e-6, 50.0)}]),
    "torch-asgd": (torch.optim.ASGD, [{}]),
}
# Settings of all optimizers that have them. Capturable ones keep their counters in tensors, as a graph needs; PyTorch
# allows it on devices only.
SETTINGS = {"capturable": True, "eps": 1e-6, "foreach": False}
for optimizer, _ in OPTIMIZERS.values():
    module = importlib.import_module(optimizer.__module__)
    if hasattr(module, "_get_capturable_supported_devices"):
        module._get_capturable_supported_devices = lambda supports_xla=True: ["cpu"]


def move(
    optimizer: type, options: dict, weights: Arrays, grads: Arrays, states: dict[str, Arrays]
) -> tuple[Arrays, dict[str, Arrays]]:
    """Return the next weights, and the next state of each weight."""
    params = {name: weight.detach().clone() for name, weight in weights.items()}
    made = optimizer(list(params.values()), **options)
    for name, param in params.items():
        param.grad = grads[name].detach()
        if states:
            made.state[param] = {key: value.clone() for key, value in states[name].items()}
    made.step()
    return params, {name: tensors(made.state[param]) for name, param in params.items()}


def tensors(state: dict) -> Arrays:
    """Return the tensors of a state."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def on_problem(optimizer: type, options: dict, problem: Problem, variant: str, style: Style = PLAIN) -> Step:
    """Return a step with the optimizer inside; its state is as the first step leaves it."""
    parameters = inspect.signature(optimizer).parameters
    options = options | {key: value for key, value in SETTINGS.items() if key in parameters}
    zeros = {name: torch.full_like(weight, 1e-3) for name, weight in problem.weights.items()}
    _, initial = move(optimizer, options, problem.weights, zeros, {})
    keys = {name: list(state) for name, state in initial.items()}
    flat = {f"{name}_{key}": value for name, state in initial.items() for key, value in state.items()}

    def run(values: Arrays) -> Outputs:
        outputs, grads = differentiate(problem, values)
        states = {name: {key: values[f"{name}_{key}"] for key in own} for name, own in keys.items()}
        weights = {name: values[name] for name in problem.weights}
        params, following = move(optimizer, options, weights, grads, states if flat else {})
        moved = {f"{name}_{key}": following[name][key] for name, own in keys.items() for key in own}
        return replace(outputs, states=params | moved)

    return Step(variant, Inputs(problem.batch, problem.weights | flat), run, style)


def on_problems(optimizer: type, settings: list[dict]) -> Iterator[Step]:
    """Yield the optimizer with each of its settings."""
    for index, options in enumerate(settings):
        tag = "-".join(options) or "default"
        yield on_problem(optimizer, options, regression(), f"{tag}-regression")
        if index == 0:
            yield on_problem(optimizer, options, square(), "square", Style(names="exporter"))
            yield on_problem(optimizer, options, classification(), "initializers", Style(states="initializers"))


@kind("torch-muon")
def torch_muon() -> Iterator[Step]:
    for tag, options in (("default", {}), ("nesterov", {"nesterov": False, "weight_decay": 0.0})):
        yield on_problem(torch.optim.Muon, options, square(), tag, Style(names="exporter"))


for name, entry in OPTIMIZERS.items():
    kind(name)(lambda entry=entry: on_problems(*entry))
