"""A training step of a module as one function of tensors, and its trace to a graph of ATen operators."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphscale.errors import ExportError
from graphscale.exporters.pytorch.aten_formulas import COMPOSITE_FORMULAS, formulas
from graphscale.exporters.pytorch.example_batch import ExampleBatch, LossCall, explain
from graphscale.exporters.pytorch.module_tensors import buffers_of, copied, parameters_of, placed
from graphscale.exporters.pytorch.negative_indices import refuse_negative_indices
from graphscale.exporters.pytorch.random_operators import RandomOperators
from graphscale.exporters.step_file import gradient_name, next_name

__all__ = ["Forward", "ForwardResult", "StepFunction", "composite_formulas", "plain_kernels", "split_tensors", "trace"]

Tensor = Any
Tensors = dict[str, Tensor]

RANDOM_STATE, RATE, LOSS = "random_state", "learning_rate", "loss"


@dataclasses.dataclass(frozen=True)
class ForwardResult:
    """The results of a forward and a backward pass.

    Attributes:
        loss: a scalar.
        metrics: other results by name.
        gradients: of the weights that the loss depends on, by name.
        buffers: the other parameters and the buffers afterwards, by name.
        changed: the names of those that the module changed.
        random: the operators, which count draws.
    """

    loss: Tensor
    metrics: Tensors
    gradients: Tensors
    buffers: Tensors
    changed: frozenset[str]
    random: RandomOperators


class Forward:
    """The forward and backward pass of a module as a function of tensors.

    Args:
        module: the module, which is copied.
        batch: the example batch.
        loss: the call of the loss.

    Attributes:
        module: the copy.

    Raises:
        ExportError: the module cannot be copied.
    """

    def __init__(self, module: Any, batch: ExampleBatch, loss: LossCall) -> None:
        try:
            self.module = copied(module)
        except Exception as error:  # whatever the module holds
            raise ExportError(f"the module cannot be copied: {explain(error)}") from error
        self._batch, self._loss = batch, loss

    def __call__(self, batch: Tensors, tensors: Tensors, random_state: Tensor, wanted: list[str]) -> ForwardResult:
        """Compute the loss and the gradients of the parameters `wanted`.

        Raises:
            ExportError: the module or the loss raises, or the loss is no scalar of a floating-point type.
        """
        held = {name: value.detach().clone() for name, value in tensors.items()}
        weights = {name: held[name].requires_grad_() for name in wanted}
        before = {name: (value, value._version) for name, value in held.items()}
        random = RandomOperators(random_state)
        with placed(self.module, held), torch.enable_grad(), random:
            try:
                result = self._loss(self.module, self._batch.fill(batch))
                moved = [name for name in wanted if held[name]._version != before[name][1]]
                if moved:
                    raise ExportError(
                        f"the module changes its weight {moved[0]} in the forward pass, as an embedding with max_norm "
                        "does, and only the optimizer may; leave that out"
                    )
                loss, metrics = self._read(result)
                grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            except ExportError:
                raise
            except Exception as error:  # whatever the user's code raises
                if isinstance(next(iter(batch.values())), FakeTensor):
                    raise
                raise ExportError(self._complain(error)) from error
        for name, grad in zip(weights, grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise ExportError(
                    f"the gradient of {name} is sparse, and ONNX has dense tensors alone; make the layer with "
                    "sparse=False"
                )
        gradients = {name: grad for name, grad in zip(weights, grads, strict=True) if grad is not None}
        buffers = {name: held[name].detach() for name in tensors if name not in weights}
        changed = frozenset(name for name in buffers if self._has_changed(held[name], before[name], tensors[name]))
        return ForwardResult(loss.detach(), metrics, gradients, buffers, changed, random)

    @staticmethod
    def _has_changed(now: Tensor, before: tuple[Tensor, int], first: Tensor) -> bool:
        """Return whether the module changed a tensor; batch normalization writes without a new version of it."""
        if now is not before[0] or now._version != before[1]:
            return True
        return not isinstance(now, FakeTensor) and not now.equal(first)

    def _complain(self, error: Exception) -> str:
        if self._loss.is_plain:
            return f"the module or the loss fails on the example batch: {explain(error)}"
        return (
            f"the module or the loss fails on the example batch: {explain(error)}; a function is called with the "
            f"module and the batch, as in loss=lambda module, batch: my_loss({self._batch.usage})"
        )

    @staticmethod
    def _read(result: Any) -> tuple[Tensor, Tensors]:
        """Take the loss and the metrics from the result of the loss function."""
        metrics: Any = {}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, metrics = result
        if not isinstance(result, torch.Tensor):
            raise ExportError(f"the loss returned a {type(result).__name__}; return a scalar tensor")
        if result.dim() > 0 and result.numel() != 1:
            raise ExportError(f"the loss has shape {list(result.shape)}; reduce it to one number, as by .mean()")
        if not result.dtype.is_floating_point:
            raise ExportError(f"the loss is of {result.dtype}; return a floating-point number")
        if not result.requires_grad:
            raise ExportError("the loss depends on no parameter that requires a gradient; nothing can be trained")
        return result.reshape(()), {str(k): torch.as_tensor(v).detach() for k, v in metrics.items()}


@dataclasses.dataclass(frozen=True)
class StepFunction:
    """A training step as a function of named tensors.

    Attributes:
        forward: the forward and backward pass.
        optimizer: computes the next weights and its state.
        clip_norm: the largest norm of all gradients together, or None.
        batch: the example batch by name.
        weights: the first values of the parameters that the optimizer updates.
        masters: those of the float32 masters of weights in float16.
        buffers: those of the buffers that the step changes.
        constants: all other parameters and buffers.
        state: the first state of the optimizer.
        random_state: the first random state, or None where nothing is drawn.
        rate: the learning rate.
        metrics: the names of the metrics.
        notes: facts about the module that its user should know.
    """

    forward: Forward
    optimizer: Any
    clip_norm: float | None
    batch: Tensors
    weights: Tensors
    masters: Tensors
    buffers: Tensors
    constants: Tensors
    state: Tensors
    random_state: Tensor | None
    rate: Tensor
    metrics: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def carried(self) -> Tensors:
        """The first values of all that a step carries to the next."""
        random = {} if self.random_state is None else {RANDOM_STATE: self.random_state}
        masters = {f"{name}.master": value for name, value in self.masters.items()}
        return {**self.weights, **masters, **self.buffers, **self.state, **random}

    @property
    def inputs(self) -> Tensors:
        """A value for each input, in order."""
        return {**self.batch, **self.carried, RATE: self.rate, **self.constants}

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, in order; the gradients stand last."""
        following = [next_name(name) for name in self.carried]
        return [LOSS, *self.metrics, *following, *map(gradient_name, self.weights)]

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Compute one step."""
        given = dict(zip(self.inputs, values, strict=True))
        held = {name: given[name] for name in (*self.weights, *self.buffers, *self.constants)}
        state = given.get(RANDOM_STATE, torch.zeros((), dtype=torch.int64))
        result = self.forward({name: given[name] for name in self.batch}, held, state, list(self.weights))
        gradients = self.widened(result.gradients)
        moved = {name: given[f"{name}.master" if name in self.masters else name] for name in self.weights}
        moved, moments = self.optimizer(
            self.clipped(gradients), moved, {name: given[name] for name in self.state}, given[RATE]
        )
        following = {name: moved[name].to(value.dtype) for name, value in self.weights.items()}
        following |= {f"{name}.master": moved[name] for name in self.masters}
        following |= {**{name: result.buffers[name] for name in self.buffers}, **moments}
        if self.random_state is not None:
            following[RANDOM_STATE] = (state + 1) % 2**31
        metrics = [result.metrics[name] for name in self.metrics]
        next_values = [following[name] for name in self.carried]
        return (result.loss, *metrics, *next_values, *(gradients[name] for name in self.weights))

    def widened(self, gradients: Tensors) -> Tensors:
        """Return gradients of the type of the masters."""
        return {name: g.to(self.masters[name].dtype) if name in self.masters else g for name, g in gradients.items()}

    def clipped(self, gradients: Tensors) -> Tensors:
        """Return gradients clipped by their global norm, as PyTorch does."""
        if self.clip_norm is None:
            return gradients
        total = torch.nn.utils.get_total_norm(list(gradients.values()), foreach=False)
        factor = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
        return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Let PyTorch compute attention and recurrent layers by operators with an ONNX form, and distributions unchecked.

    The dispatcher in Python takes those of recurrent layers apart as tracing does: both draw the same random numbers.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
            enable_python_dispatcher(),
            # The checks of their parameters decide by the values of tensors.
            mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def composite_formulas() -> Iterator[None]:
    """Let the dispatcher in Python compute operators by formulas that tracing would take apart before.

    For tracing alone: PyTorch's own steps, which a formula is compared with, must not use it.
    """
    with contextlib.ExitStack() as stack:
        for operator, formula in COMPOSITE_FORMULAS.items():
            operator._dispatch_cache.clear()
            stack.callback(operator._dispatch_cache.clear)
            kernels = {torch._C.DispatchKey.CompositeImplicitAutograd: formula}
            stack.enter_context(mock.patch.dict(operator.py_kernels, kernels))
        yield


def trace(step: Callable[..., Any], values: list[Tensor], dynamic: list[bool]) -> Any:
    """Trace a step to a graph of ATen operators.

    Args:
        step: the function.
        values: a value for each argument.
        dynamic: whether the first axis of the argument may have any size; all of these are the same.

    Raises:
        ExportError: the module fixes the size of the batch.
    """
    # A loss may hold tensors of its own, such as the weights of classes: constants of the step.
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        fakes = []
        for index, (value, is_dynamic) in enumerate(zip(values, dynamic, strict=True)):
            axes = [DimDynamic.STATIC] * value.dim()
            if is_dynamic:
                axes[0] = DimDynamic.DUCK
            source = torch._dynamo.source.ConstantSource(f"argument_{index}")
            context = StatelessSymbolicContext(dynamic_sizes=axes)
            fakes.append(mode.from_tensor(value, symbolic_context=context, source=source))
        batches = [fake.shape[0] for fake, is_dynamic in zip(fakes, dynamic, strict=True) if is_dynamic]
    with plain_kernels(), composite_formulas():
        graph = make_fx(step, formulas(), tracing_mode="symbolic")(*fakes)
    for size in batches:
        if mode.shape_env.replace(size.node.expr).is_number:
            raise ExportError(
                f"the module fixes the size of the batch at {size.node.hint}; pass dynamic_batch=False, or take the "
                "size from the tensors"
            )
    for node in list(graph.graph.nodes):
        if "profiler" in str(node.target):
            node.replace_all_uses_with(None)
            graph.graph.erase_node(node)
    refuse_negative_indices(graph.graph)
    graph.recompile()
    return graph


def split_tensors(module: Any) -> tuple[Tensors, Tensors]:
    """Return copies of the trainable parameters of a module, and of all its other parameters and buffers."""
    parameters = parameters_of(module)
    trained = {name: p.detach().clone() for name, p in parameters.items() if p.requires_grad}
    for name, tensor in (parameters | buffers_of(module)).items():
        if tensor.is_complex():
            raise ExportError(
                f"{name} is complex, and ONNX has no operators on complex numbers; keep its real and imaginary parts "
                "apart"
            )
    others = {name: p.detach().clone() for name, p in parameters.items() if not p.requires_grad}
    return trained, others | {name: b.detach().clone() for name, b in buffers_of(module).items()}
