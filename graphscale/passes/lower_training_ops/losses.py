"""The losses of class numbers along axis 1, and their derivatives."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.class_numbers import at_classes, less_one_hot, widest
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]

_INT64 = ir.DataType.INT64


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a loss, one for each label.

    Attributes:
        f: the writer.
        classes: their classes, as int64; 0 for a row that is ignored.
        counted: whether each is counted; None if all are.
        weights: the weight of each one's class; None if all are 1.
    """

    f: Writer
    classes: ir.Value
    counted: ir.Value | None
    weights: ir.Value | None

    @classmethod
    def of(cls, f: Writer, labels: ir.Value, weights: ir.Value | None, ignored: ir.Value | int | None) -> _Rows:
        """Tell the rows of some labels, weights of all classes, and the label that is ignored."""
        classes, counted = f.cast(labels, _INT64), None
        if ignored is not None:
            ignored = f.cast(ignored, _INT64) if isinstance(ignored, ir.Value) else ignored
            counted = f("Not", f("Equal", classes, ignored))
            classes = f("Where", counted, classes, 0)
        if weights is not None:
            weights = f.cast(f("Gather", weights, classes), widest(f))
        return cls(f, classes, counted, weights)

    def weighted(self, values: ir.Value) -> ir.Value:
        """Multiply a value of each row, or of all, by the weights, 0 for rows that are ignored."""
        values = values if self.weights is None else self.f("Mul", values, self.weights)
        return values if self.counted is None else self.f("Where", self.counted, values, 0.0)

    def total(self) -> ir.Value:
        """Sum the weights, of which there are some, or count the rows, of which some are not counted."""
        return self.f.reduce_sum(self.weighted(self.f.number(1.0, widest(self.f))), keepdims=False)


def _loss_internal(f: Writer) -> list[ir.Value]:
    """Compute `log_prob = log_softmax(scores)` and the loss: see `_loss`.

    As in the kernels, label -1 is ignored if there is no `ignore_index`, and a mean without any weight is 0. Where
    `output_type` is the wider type, it is that of the computation, as in the schema's function.
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
    """Compute `L[n] = -log_prob[n, label[n]] * weight[label[n]]`, 0 where a label is ignored, as the kernels do.

    Or by `reduction` the sum of them, or that divided by the sum of the weights, which is 1 for each without weights.
    """
    losses = rows.weighted(f("Neg", f.cast(at_classes(f, log_prob, rows.classes, 1), widest(f))))
    reduction = _reduction(f)
    if reduction == "none":
        return losses
    if reduction == "mean" and rows.weights is None and rows.counted is None:
        return f.reduce_mean(losses, keepdims=False)
    total = f.reduce_sum(losses, keepdims=False)
    return f("Div", total, _divisor(f, rows.total(), safe)) if reduction == "mean" else total


def _loss_grad(f: Writer) -> list[ir.Value]:
    """Compute the gradient of SoftmaxCrossEntropyLoss: see `_slope`; label -1 is ignored if not said otherwise."""
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
    """Compute `dX = (exp(log_prob) - one_hot(label)) * dY * weight[label]`, 0 where a label is ignored.

    So do the kernels; for a mean, dY is divided as the loss is. Where `log_prob` of an ignored label is NaN, the result
    is NaN here, and 0 in the kernels.
    """
    dy, log_prob = f.cast(f.data(0), widest(f)), f.cast(f.data(1), _computed(f))
    rows = _Rows.of(f, f.data(2), f.input(3), ignored)
    if _reduction(f) == "mean":
        dy = f("Div", dy, _divisor(f, rows.total(), safe=True))
    scale = f.cast(rows.weighted(dy), _computed(f))
    return f("Mul", less_one_hot(f, f("Exp", log_prob), rows.classes, 1), f.unsqueeze(scale, [1]))


def _divisor(f: Writer, total: ir.Value, safe: bool) -> ir.Value:
    return f("Where", f.cast(total, ir.DataType.BOOL), total, 1.0) if safe else total


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
