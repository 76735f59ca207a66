"""Gradients of ATen operators that PyTorch's ONNX exporter lacks, as formulas of operators that it has."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn import functional

from graphscale.exporters.pytorch import embedding_bags
from graphscale.exporters.pytorch.negative_indices import refuse_negative

__all__ = ["COMPOSITE_FORMULAS", "formulas"]

Tensor = Any
_aten = torch.ops.aten

# Decompositions of PyTorch that its table of core operators lacks, or that its exporter computes wrongly: it takes the
# number of targets of nll_loss for 1.
_FURTHER = (
    *(_aten.nll_loss_forward, _aten.nll_loss2d_forward, _aten.nll_loss_backward, _aten.nll_loss2d_backward),
    *(_aten._native_batch_norm_legit, _aten._native_batch_norm_legit_functional, _aten.native_batch_norm),
    *(_aten.native_batch_norm_backward, _aten.native_layer_norm_backward, _aten.native_group_norm_backward),
    *(
        _aten._weight_norm_interface,
        _aten.embedding_dense_backward,
        _aten.reflection_pad1d_backward,
        _aten.reflection_pad2d_backward,
    ),
    *(_aten.replication_pad1d, _aten.replication_pad2d, _aten.replication_pad3d, _aten.grid_sampler_2d),
)


def formulas() -> dict[Any, Callable[..., Any]]:
    """Return the table of decompositions for tracing a step: `{operator: function}`."""
    table = {**core_aten_decompositions(), **get_decompositions(_FURTHER)}
    table[_aten.convolution_backward.default] = _convolution_backward
    table[_aten._trilinear.default] = _trilinear
    table[_aten._weight_norm_interface_backward.default] = _weight_norm_backward
    table |= {operator: _separable_backward(axes_of) for operator, axes_of in _SEPARABLE.items()}
    table |= {_aten.avg_pool2d.default: _rounded_up(2), _aten.avg_pool3d.default: _rounded_up(3)}
    table[_aten.rrelu_with_noise.default] = _rrelu
    table |= {operator: _refusing(table[operator]) for operator in (_aten.index_add.default, _aten.index_copy.default)}
    # The order of a tensor's numbers in memory, which ONNX does not have.
    table[torch.ops.prims.copy_strided.default] = lambda x, stride: x
    table[_aten.empty_permuted.default] = lambda size, order, **options: torch.zeros(size, **options)
    return table | _SCATTERED | embedding_bags.FORMULAS


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of a convolution by convolutions."""
    axes = len(weight.shape) - 2
    stride, padding, dilation = (list(v) * (axes if len(v) == 1 else 1) for v in (stride, padding, dilation))
    grad_x = grad_weight = None
    if mask[0] and transposed:
        grad_x = _aten.convolution(grad, weight, None, stride, padding, dilation, False, [0] * axes, groups)
        grad_x = _cut(grad_x, x.shape[2:])
    elif mask[0]:
        sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        missing = [
            full - ((size - 1) * step - 2 * border + gap * (k - 1) + 1) for full, size, k, step, border, gap in sizes
        ]
        grad_x = _aten.convolution(grad, weight, None, stride, padding, dilation, True, missing, groups)
    if mask[1]:
        # The batch becomes the channels: a convolution of the input with the output's gradient.
        slid, kernel = (grad, x) if transposed else (x, grad)
        found = _aten.convolution(
            *(_batch_as_channels(slid, groups, False), _batch_as_channels(kernel, groups, True)),
            *(None, dilation, padding, stride, False, [0] * axes, groups),
        )
        found = _cut(found, weight.shape[2:]).unflatten(1, (groups, -1)).movedim(0, 2)
        grad_weight = found.reshape(weight.shape)
    return grad_x, grad_weight, grad.sum([0, *range(2, axes + 2)]) if mask[2] else None


def _batch_as_channels(x: Tensor, groups: int, is_kernel: bool) -> Tensor:
    """Move the batch of `[N, G*c, ...]` to the channels: `[c, G*N, ...]`, or `[G*c, N, ...]` for a kernel."""
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    if is_kernel:
        return parts.movedim(0, 2).reshape(x.shape[1], x.shape[0], *x.shape[2:])
    return parts.movedim(2, 0).transpose(1, 2).reshape(x.shape[1] // groups, groups * x.shape[0], *x.shape[2:])


def _cut(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Cut the axes from 2 on to these sizes."""
    for axis, size in enumerate(sizes, start=2):
        x = x.narrow(axis, 0, size)
    return x


def _cumprod_backward(grad: Tensor, x: Tensor, dim: int, output: Tensor) -> Tensor:
    """Compute the gradient of a cumulative product, whose products end at the first zero, or leave it out."""

    def sum_backwards(values: Tensor) -> Tensor:
        return values.flip(dim).cumsum(dim).flip(dim)

    zeros = (x == 0).to(torch.int64)
    count = zeros.cumsum(dim)
    is_first = (zeros * count) == 1
    others = torch.where(is_first, 1.0, x)
    before = sum_backwards(grad * output) / torch.where(x == 0, 1.0, x)
    at_first = sum_backwards(grad * torch.cumprod(others, dim))
    return torch.where(count == 0, before, torch.where(is_first, at_first, 0.0))


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """Compute RReLU outside of training, where its slope is the mean."""
    return NotImplemented if training else functional.leaky_relu(x, (lower + upper) / 2)


def _refusing(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a formula of an operator that refuses negative indices; the operators that it is made of take them."""

    def compute(x: Tensor, dim: int, index: Tensor, *args: Any, **options: Any) -> Tensor:
        return formula(x, dim, refuse_negative(index), *args, **options)

    return compute


def _one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
    """Put a one at each class: a runtime refuses a class out of range, as PyTorch does."""
    count = int(classes.max()) + 1 if num_classes < 0 else num_classes
    zeros = torch.zeros(*classes.shape, count, dtype=torch.int64)
    return zeros.scatter(-1, classes.unsqueeze(-1), 1)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Sum the product of three tensors over axes, as torch.nn.Bilinear does."""
    letters = string.ascii_letters[: a.dim() + len(expand_a)]
    *terms, result = (
        "".join(letter for axis, letter in enumerate(letters) if axis not in left_out)
        for left_out in (expand_a, expand_b, expand_c, sumdim)
    )
    return torch.einsum(f"{','.join(terms)}->{result}", a, b, c)


def _weight_norm_backward(
    grad: Tensor, direction: Tensor, length: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `length * direction / norm(direction)`, whose norm leaves out one axis."""
    axes = [axis for axis in range(direction.dim()) if axis != dim % direction.dim()]
    along = (grad * direction).sum(axes, keepdim=True) / norms
    return (grad - direction * along / norms) * (length / norms), along


# Formulas of operators that tracing takes apart before it sees them.
COMPOSITE_FORMULAS = {_aten.cumprod_backward.default: _cumprod_backward, _aten.one_hot.default: _one_hot}

# A separable operator is linear, and its matrix is a product of one matrix per axis: each is the operator on a basis.
_Operator = Callable[[Tensor], Tensor]


def _matrix(operator: _Operator, size: int, dtype: Any) -> Tensor:
    """Compute the matrix `[output, input]` of an operator on one axis of `[N, C, size]`, as a constant of the trace."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        numbers = operator(torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1).t().tolist()
    return torch.tensor(numbers, dtype=dtype)


def _separable_backward(axes_of: Callable[..., tuple[Sequence[int], list[_Operator]]]) -> Callable[..., Tensor]:
    """Return the formula of a backward operator; `axes_of` gives the size of each axis, and its operator."""

    def backward(grad: Tensor, *args: Any) -> Tensor:
        return _apply(grad, *axes_of(grad, *args), is_forward=False)

    return backward


def _apply(x: Tensor, sizes: Sequence[int], operators: list[_Operator], is_forward: bool) -> Tensor:
    """Multiply by the matrix of each of the last axes, or by its transpose in a backward pass."""
    first = x.dim() - len(operators)
    for axis, (size, operator) in enumerate(zip(sizes[-len(operators) :], operators, strict=True), start=first):
        matrix = _matrix(operator, int(size), x.dtype)
        x = torch.matmul(x.movedim(axis, -1), matrix.t() if is_forward else matrix).movedim(-1, axis)
    return x


def _adaptive(grad: Tensor, x: Tensor) -> tuple[Sequence[int], list[_Operator]]:
    outputs = grad.shape[2 - grad.dim() :] if grad.dim() > 3 else grad.shape[-2:]
    return x.shape, [functools.partial(functional.adaptive_avg_pool1d, output_size=size) for size in outputs]


def _average(axes: int) -> Callable[..., tuple[Sequence[int], list[_Operator]]]:
    def axes_of(
        grad: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        include_pad: bool,
        divisor: int | None,
    ) -> tuple[Sequence[int], list[_Operator]]:
        def pooled(e: Tensor, window: tuple[int, int, int]) -> Tensor:
            return functional.avg_pool1d(e, *window, ceil_mode, include_pad)

        def summed(e: Tensor, window: tuple[int, int, int]) -> Tensor:
            # avg_pool1d has no divisor; a second axis of size one has.
            size, step, border = ([v, w] for v, w in zip(window, (1, 1, 0), strict=True))
            return functional.avg_pool2d(e.unsqueeze(-1), size, step, border, ceil_mode, True, 1).squeeze(-1)

        def divided(e: Tensor, window: tuple[int, int, int]) -> Tensor:
            return summed(e, window) / divisor

        windows = list(zip(*(list(v) * (axes // len(v)) for v in (kernel, stride or kernel, padding)), strict=True))
        if divisor is None:
            return x.shape, [functools.partial(pooled, window=window) for window in windows]
        # The divisor counts once for all axes.
        first, *others = windows
        operators = [functools.partial(summed, window=window) for window in others]
        return x.shape, [functools.partial(divided, window=first), *operators]

    return axes_of


def _rounded_up(axes: int) -> Callable[..., Tensor]:
    """Return average pooling with ceil_mode, whose windows at the border ONNX Runtime divides by another number."""

    def pooled(
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        include_pad: bool = True,
        divisor: int | None = None,
    ) -> Tensor:
        if not ceil_mode:
            return NotImplemented
        found = _average(axes)(x, x, kernel, stride, padding, ceil_mode, include_pad, divisor)
        return _apply(x, *found, is_forward=True)

    return pooled


def _interpolated(operator: Any, axes: int) -> Callable[..., tuple[Sequence[int], list[_Operator]]]:
    has_corners = any(argument.name == "align_corners" for argument in operator.default._schema.arguments)

    def axes_of(
        grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *rest: Any
    ) -> tuple[Sequence[int], list[_Operator]]:
        aligned, scales = (rest[:1], rest[1:]) if has_corners else ((), rest)
        scales = tuple(scales) + (None,) * (axes - len(scales))

        def along(e: Tensor, size: int, scale: float | None) -> Tensor:
            if operator is _aten.upsample_bicubic2d:  # it has no form of one axis
                return operator(e.unsqueeze(2), [1, size], *aligned, None, scale).squeeze(2)
            return operator(e, [size], *aligned, scale)

        pairs = zip(output_size, scales, strict=True)
        return input_size, [functools.partial(along, size=size, scale=scale) for size, scale in pairs]

    return axes_of


def _replicated(grad: Tensor, x: Tensor, padding: Sequence[int]) -> tuple[Sequence[int], list[_Operator]]:
    pairs = [tuple(padding[i : i + 2]) for i in range(0, len(padding), 2)][::-1]
    return x.shape, [functools.partial(functional.pad, pad=pair, mode="replicate") for pair in pairs]


_SEPARABLE: dict[Any, Callable[..., tuple[Sequence[int], list[_Operator]]]] = {
    _aten._adaptive_avg_pool2d_backward.default: _adaptive,
    _aten._adaptive_avg_pool3d_backward.default: _adaptive,
    _aten.avg_pool2d_backward.default: _average(2),
    _aten.avg_pool3d_backward.default: _average(3),
    _aten.upsample_linear1d_backward.default: _interpolated(_aten.upsample_linear1d, 1),
    _aten.upsample_bilinear2d_backward.default: _interpolated(_aten.upsample_linear1d, 2),
    _aten.upsample_trilinear3d_backward.default: _interpolated(_aten.upsample_linear1d, 3),
    _aten.upsample_bicubic2d_backward.default: _interpolated(_aten.upsample_bicubic2d, 2),
    _aten.upsample_nearest1d_backward.default: _interpolated(_aten.upsample_nearest1d, 1),
    _aten.upsample_nearest2d_backward.default: _interpolated(_aten.upsample_nearest1d, 2),
    _aten.upsample_nearest3d_backward.default: _interpolated(_aten.upsample_nearest1d, 3),
    _aten._upsample_nearest_exact1d_backward.default: _interpolated(_aten._upsample_nearest_exact1d, 1),
    _aten._upsample_nearest_exact2d_backward.default: _interpolated(_aten._upsample_nearest_exact1d, 2),
    _aten._upsample_nearest_exact3d_backward.default: _interpolated(_aten._upsample_nearest_exact1d, 3),
    _aten.replication_pad1d_backward.default: _replicated,
    _aten.replication_pad2d_backward.default: _replicated,
    _aten.replication_pad3d_backward.default: _replicated,
}


def _scattered(axes: int) -> Callable[..., Tensor]:
    """Return the gradient of max pooling: each number goes to the place of its maximum."""

    def backward(grad: Tensor, x: Tensor, *settings: Any) -> Tensor:
        indices = settings[-1]
        flat = torch.zeros_like(x).flatten(-axes)
        return flat.scatter_add(-1, indices.flatten(-axes), grad.flatten(-axes)).reshape(x.shape)

    return backward


_SCATTERED = {
    _aten.max_pool2d_with_indices_backward.default: _scattered(2),
    _aten.max_pool3d_with_indices_backward.default: _scattered(3),
    _aten.adaptive_max_pool2d_backward.default: _scattered(2),
    _aten.adaptive_max_pool3d_backward.default: _scattered(3),
}
