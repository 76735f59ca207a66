"""The losses of class numbers along axis 1, and their derivatives."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.class_numbers import at_classes, less_one_hot, widest
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]

_INT64, _BOOL = ir.DataType.INT64, ir.DataType.BOOL


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a loss, one for each label.

    Attributes:
        f: the writer.
        classes: the classes of the rows, as int64; 0 for an ignored row.
        ignored: for each row, whether it is ignored; None if no row is.
        weights: for each row, the weight of its class; None if all are 1.
    """

    f: Writer
    classes: ir.Value
    ignored: ir.Value | None
    weights: ir.Value | None

    @classmethod
    def of(cls, f: Writer, labels: ir.Value, weights: ir.Value | None, ignored: ir.Value | int | None) -> _Rows:
        """Return the rows of some labels, from the weights of all classes and the ignored label."""
        classes, is_ignored = f.cast(labels, _INT64), None
        if ignored is not None:
            label = f.cast(ignored, _INT64) if isinstance(ignored, ir.Value) else ignored
            is_ignored = f("Equal", classes, label)
            classes = f("Where", is_ignored, 0, classes)
        if weights is not None:
            weights = f.cast(f("Gather", weights, classes), widest(f))
        return cls(f, classes, is_ignored, weights)

    def weighted(self, values: ir.Value) -> ir.Value:
        """Multiply a value of each row, or of all rows, by the weights, 0 for ignored rows."""
        values = values if self.weights is None else self.f("Mul", values, self.weights)
        return values if self.ignored is None else self.f("Where", self.ignored, 0.0, values)

    def total(self, safe: bool) -> ir.Value:
        """Sum the weights, or count the rows if some may be ignored; 1 for 0 in a safe divisor."""
        f = self.f
        total = f.reduce_sum(self.weighted(f.number(1.0, widest(f))), keepdims=False)
        if not safe:
            return total
        return f("Max", total, 1.0) if self.weights is None else f("Where", f.cast(total, _BOOL), total, 1.0)


def _loss_internal(f: Writer) -> list[ir.Value]:
    """Compute `log_prob = log_softmax(scores)` and the loss: see `_loss`.

    As in the kernels, label -1 is ignored without an `ignore_index`, and a mean without any weight is 0. A wider
    `output_type` is the type of the computation, as in the schema's function.
    """
    x = f.cast(f.data(0), _computed(f))
    log_prob = f.log_softmax(x, 1)
    rows = _Rows.of(f, f.data(1), f.input(2), f.input(3) or -1)
    results = [_loss(f, log_prob, rows, safe=True), log_prob]
    return [f.cast(value, _given(f)) for value in results]


def _negative_log_likelihood(f: Writer) -> list[ir.Value]:
    """Compute the loss of logarithms of probabilities: see `_loss`; a mean without any weight is 0 / 0."""
    rows = _Rows.of(f, f.data(1), f.input(2), f.input(3))
    return [f.cast(_loss(f, f.data(0), rows, safe=False), f.dtype)]


def _loss(f: Writer, log_prob: ir.Value, rows: _Rows, safe: bool) -> ir.Value:
    """Compute `L[n] = -log_prob[n, label[n]] * weight[label[n]]`, 0 for an ignored label, as the kernels do.

    `reduction` may ask for the sum, or for the sum divided by that of the weights, by default 1 each.
    """
    losses = rows.weighted(f("Neg", f.cast(at_classes(f, log_prob, rows.classes, 1), widest(f))))
    reduction = _reduction(f)
    if reduction == "none":
        return losses
    if reduction == "mean" and rows.weights is None and rows.ignored is None:
        return f.reduce_mean(losses, keepdims=False)
    total = f.reduce_sum(losses, keepdims=False)
    return f("Div", total, rows.total(safe)) if reduction == "mean" else total


def _loss_grad(f: Writer) -> list[ir.Value]:
    """Compute the gradient of SoftmaxCrossEntropyLoss: see `_slope`; label -1 is ignored by default."""
    return [_slope(f, f.attribute("ignore_index", -1))]


def _loss_internal_grad(f: Writer) -> list[ir.Value]:
    """Compute the gradient of SoftmaxCrossEntropyLossInternal, see `_slope`, plus `bias`, in the type `output_type`."""
    grad, bias = _slope(f, f.input(4) or -1), f.input(5)
    if bias is not None:
        shape = f.shape(f.data(1))
        is_alike = shape is not None and None not in shape and shape == f.shape(bias)
        bias = bias if is_alike else f.reshape(bias, f.shape_of(f.data(1)))
        grad = f("Add", grad, f.cast(bias, _computed(f)))
    return [f.cast(grad, _given(f))]


def _slope(f: Writer, ignored: ir.Value | int) -> ir.Value:
    """Compute `dX = (exp(log_prob) - one_hot(label)) * dY * weight[label]`, 0 for an ignored label.

    The kernels do so; for a mean, dY is divided like the loss. If `log_prob` of an ignored label is NaN, the result is
    NaN here, and 0 in the kernels.
    """
    dy, log_prob = f.cast(f.data(0), widest(f)), f.cast(f.data(1), _computed(f))
    rows = _Rows.of(f, f.data(2), f.input(3), ignored)
    if _reduction(f) == "mean":
        dy = f("Div", dy, rows.total(safe=True))
    scale = f.cast(rows.weighted(dy), _computed(f))
    return f("Mul", less_one_hot(f, f("Exp", log_prob), rows.classes, 1), f.unsqueeze(scale, [1]))


def _reduction(f: Writer) -> str:
    reduction = str(f.attribute("reduction", "mean"))
    if reduction not in ("mean", "sum", "none"):
        raise f.refusal(f"its reduction is {reduction!r}; it must be mean, sum or none")
    return reduction


def _given(f: Writer) -> ir.DataType:
    return ir.DataType(f.attribute("output_type", f.dtype))


def _computed(f: Writer) -> ir.DataType:
    return max(f.dtype, _given(f), key=lambda dtype: dtype.itemsize)


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "SoftmaxCrossEntropyLossInternal"): _loss_internal,
    (MICROSOFT, "SoftmaxCrossEntropyLossGrad"): _loss_grad,
    (MICROSOFT, "SoftmaxCrossEntropyLossInternalGrad"): _loss_internal_grad,
    (MICROSOFT, "NegativeLogLikelihoodLossInternal"): _negative_log_likelihood,
    (MICROSOFT, "NegativeLogLikelihoodLossInternal2"): _negative_log_likelihood,
}
