"""Losses, with derivatives by the chain rule and in the folded forms of exporters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.tape.trace import Tape, Var


def random_loss(tape: Tape, y: Var, weights: list[Var], hidden: list[Var]) -> Var:
    """A scalar loss of a prediction `y`, often with more terms: a second loss, weight decay, an activity penalty."""
    loss = _term(tape, y)
    for _ in range(tape.choices.choice((0, 0, 0, 1, 1, 2))):
        kind = tape.choices.randrange(3)
        factor = tape.choices.choice((1.0, 0.5, 0.01))
        if kind == 0:
            more = _term(tape, tape.choices.choice([y, *hidden]))
        elif kind == 1:
            # A coefficient near one would make an update of the gradient, and no one decays weights that fast.
            more, factor = _square_sum(tape, tape.choices.choice(weights)), tape.choices.choice((0.01, 0.0005))
        else:
            a = tape.choices.choice(hidden)
            more = tape.reduce("ReduceMean", tape.op("Abs", a) if tape.flag() else tape.op("Mul", a, a))
        loss = _weighted_sum(tape, loss, more, factor)
    return loss


def _weighted_sum(tape: Tape, loss: Var, more: Var, factor: float) -> Var:
    if factor != 1.0:
        more = tape.mul(more, factor)
        if tape.flag(4):
            loss = tape.mul(loss, 1.0 - factor)
    return tape.op("Sum" if tape.flag(4) else "Add", loss, more)


def _term(tape: Tape, y: Var) -> Var:
    if y.largest > 20:
        y = tape.op("Tanh", y)
    if len(y.shape) != 2:
        y = tape.op("Reshape", y, np.asarray([-1, y.shape[-1]], dtype=np.int64))
    kinds: list[Callable[[Tape, Var], Var]] = [
        _mean_square,
        _cross_entropy,
        _binary_cross_entropy,
        _divergence,
        _absolute,
        _linear,
    ]
    return tape.choices.choice(kinds)(tape, y)


def _average(tape: Tape, losses: Var) -> Var:
    """The mean or sum of single losses, sometimes weighted by a weight for each sample."""
    if tape.flag(4):
        weights = tape.leaf(tape.numbers.uniform(0.5, 1.5, losses.shape), "input")
        weighted = tape.mul(losses, weights)
        if tape.flag():
            return tape.op("Div", tape.reduce("ReduceSum", weighted), tape.reduce("ReduceSum", weights))
        return tape.reduce("ReduceMean", weighted)
    if len(losses.shape) == 2 and tape.flag(3):
        losses = tape.reduce("ReduceSum", losses, (1,))
    return tape.reduce("ReduceSum" if tape.flag(4) else "ReduceMean", losses)


def _target(tape: Tape, y: Var) -> Var:
    return tape.leaf(tape.numbers.normal(size=y.shape), "input")


def _mean_square(tape: Tape, y: Var) -> Var:
    t = _target(tape, y)
    if tape.flag(3):
        return _folded_mean_square(tape, y, t)
    d = tape.op("Sub", y, t)
    return _average(tape, tape.op("Mul", d, d) if tape.flag() else tape.op("Pow", d, 2.0))


def _folded_mean_square(tape: Tape, y: Var, t: Var) -> Var:
    """Whose cotangent is (2/N)*d, as exporters fold it, times the seed."""
    with tape.custom() as record:
        d = tape.op("Sub", y, t)
        loss = tape.reduce("ReduceMean", tape.op("Mul", d, d))
    factor = 2.0 / d.array.size
    return record((y,), loss, lambda g, _: tape.mul(tape.mul(g, factor), tape.saved(d)))


def _absolute(tape: Tape, y: Var) -> Var:
    return _average(tape, tape.op("Abs", tape.op("Sub", y, _target(tape, y))))


def _linear(tape: Tape, y: Var) -> Var:
    if tape.flag():
        return tape.reduce("ReduceMean" if tape.flag() else "ReduceSum", y)
    return _average(tape, tape.op("Mul", y, _target(tape, y)))


def _square_sum(tape: Tape, w: Var) -> Var:
    if tape.flag():
        return tape.reduce("ReduceSumSquare", w)
    return tape.reduce("ReduceSum", tape.op("Mul", w, w))


def _labels(tape: Tape, y: Var) -> Var:
    return tape.leaf(tape.numbers.integers(0, y.shape[1], y.shape[:1]), "input")


def _probabilities(tape: Tape, y: Var) -> Var:
    """Targets that sum to one: given, one-hot, or one-hot with label smoothing."""
    classes = y.shape[1]
    kind = tape.choices.randrange(3)
    if kind == 0:
        return tape.leaf(tape.numbers.dirichlet(np.ones(classes), y.shape[:1]), "input")
    one, zero = (1.0, 0.0) if kind == 1 else (0.9 + 0.1 / classes, 0.1 / classes)
    return tape.op("OneHot", _labels(tape, y), np.asarray(classes), np.asarray([zero, one]))


def _cross_entropy(tape: Tape, y: Var) -> Var:
    spelling = tape.choices.randrange(5)
    if spelling == 0:
        return _folded_cross_entropy(tape, y, _probabilities(tape, y))
    if spelling == 1:
        return _fused_cross_entropy(tape, y, _labels(tape, y))
    if spelling == 2:
        logp = tape.op("Log", tape.op("Softmax", y, axis=-1))
    elif spelling == 3:
        logp = tape.op("LogSoftmax", y, axis=-1)
    else:
        largest = tape.stop(tape.reduce("ReduceMax", y, (-1,), keepdims=1))
        shifted = tape.op("Sub", y, largest)
        total = tape.reduce("ReduceSum", tape.op("Exp", shifted), (-1,), keepdims=1)
        logp = tape.op("Sub", shifted, tape.op("Log", total))
    if tape.flag(3):
        index = tape.op("Unsqueeze", _labels(tape, y), np.asarray([1]))
        return _average(tape, tape.op("Neg", tape.op("GatherElements", logp, index, axis=1)))
    losses = tape.mul(logp, _probabilities(tape, y))
    return _average(tape, tape.op("Neg", tape.reduce("ReduceSum", losses, (1,))))


def _folded_cross_entropy(tape: Tape, y: Var, target: Var) -> Var:
    """Whose cotangent is (softmax - target) / n."""
    with tape.custom() as record:
        logp = tape.op("LogSoftmax", y, axis=-1)
        total = tape.reduce("ReduceSum", tape.mul(logp, target))
        loss = tape.op("Div", tape.op("Neg", total), float(y.shape[0]))

    def pull(g: Var, _: int) -> Var:
        if tape.flag():
            p = tape.op("Exp", tape.saved(logp))
        else:
            p = tape.op("Softmax", tape.saved(y), axis=-1)
        d = tape.op("Sub", p, tape.saved(target))
        return tape.mul(d, tape.op("Div", g, float(y.shape[0])))

    return record((y,), loss, pull)


def _fused_cross_entropy(tape: Tape, y: Var, labels: Var) -> Var:
    reduction = tape.choices.choice(("mean", "sum"))
    with tape.custom() as record:
        loss = tape.op("SoftmaxCrossEntropyLoss", y, labels, reduction=reduction)

    def pull(g: Var, _: int) -> Var:
        hot = tape.op("OneHot", labels, np.asarray(y.shape[1]), np.asarray([0.0, 1.0]))
        d = tape.op("Sub", tape.op("Softmax", tape.saved(y), axis=-1), hot)
        return tape.mul(d, tape.mul(g, 1.0 / y.shape[0]) if reduction == "mean" else g)

    return record((y,), loss, pull)


def _binary_cross_entropy(tape: Tape, z: Var) -> Var:
    t = tape.leaf(tape.numbers.uniform(0, 1, z.shape), "input")
    if tape.flag():
        if tape.flag():
            losses = tape.op("Sub", tape.op("Softplus", z), tape.mul(z, t))
        else:
            decay = tape.op("Exp", tape.op("Neg", tape.op("Abs", z)))
            rest = tape.op("Log", tape.op("Add", decay, 1.0))
            losses = tape.op("Add", tape.op("Sub", tape.op("Max", z, 0.0), tape.mul(z, t)), rest)
        return _average(tape, losses)
    with tape.custom() as record:
        losses = tape.op("Sub", tape.op("Softplus", z), tape.mul(z, t))
        loss = tape.reduce("ReduceMean", losses)

    def pull(g: Var, _: int) -> Var:
        d = tape.op("Sub", tape.op("Sigmoid", tape.saved(z)), t)
        if tape.flag():
            return tape.mul(tape.op("Div", d, float(z.array.size)), g)
        return tape.mul(d, tape.op("Div", g, float(z.array.size)))

    return record((z,), loss, pull)


def _divergence(tape: Tape, y: Var) -> Var:
    """Kullback-Leibler, from a teacher's probabilities or log-probabilities."""
    teacher = tape.leaf(tape.numbers.dirichlet(5 * np.ones(y.shape[1]), y.shape[:1]), "input")
    gap = tape.op("Sub", tape.op("Log", teacher), tape.op("LogSoftmax", y, axis=-1))
    terms = tape.mul(teacher, gap)
    if tape.flag():
        return tape.op("Div", tape.reduce("ReduceSum", terms), float(y.shape[0]))
    return _average(tape, terms)
