"""Linear steps, with batches: in some of them one buffer for the weight, written over, could give wrong numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np
import onnx

import graphscale as gs
from tests.build import linear_step
from tests.conftest import Arrays, with_initializers

SGD = "u = Mul(rate, dw)  w_next = Sub(w, u)"
CONSTANTS = """float rate = {0.1}, float one = {1}, float zero = {0}, float half = {0.5}, int64[1] flat = {-1},
    int64[1] axis = {0}, bool always = {1}, int64 twice = {2}, int64[4] backwards = {3, 2, 1, 0},
    int64[2] whole = {4, 3}, int64[1] first = {0}, int64[1] end = {4}, int64[2] once = {1, 1},
    int64[4] nothing = {0, 0, 0, 0}, float[4,4] q = {1, 0.2, 0, 0, 0, 1, 0.3, 0, 0.5, 0, 1, 0, 0, 0.1, 0, 1}"""

ONES = {"x": np.ones((8, 4), np.float32), "t": np.ones((8, 3), np.float32)}


def batches(count: int, bad: Collection[int] = (), seed: int = 0) -> Iterator[Arrays]:
    """Batches of a linear step; the bad ones, counted from 0, have a NaN in them."""
    random = np.random.default_rng(seed)
    for number in range(count):
        x, t = (random.standard_normal(shape).astype(np.float32) for shape in ((8, 4), (8, 3)))
        if number in bad:
            x[3, 1] = np.nan
        yield {"x": x, "t": t}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        more: nodes after the backward pass; they make `w_next`.
        outputs: further outputs.
        seen: nodes that make `seen` of `w`, which the forward pass then reads in its place; none: it reads `w`.
        second: there is a second state, `w2`.
        named: the gradient has to be named: behind it are matrix products.
        shares: in a guarded step one buffer is safe for `w`, whatever order its nodes run in.
    """

    more: str
    outputs: str = "float[4,3] metric"
    seen: str = ""
    second: bool = False
    named: bool = False
    shares: bool = False

    def scaled(self, loss_scale: str | float, target: str) -> gs.ScaledModel:
        """The step with a loss scale."""
        gradients = ["dw"] if self.named else None
        return gs.scale(
            self.model(), loss_scale, updates=self.updates, gradients=gradients, target=target, force_roles=True
        )

    @property
    def updates(self) -> dict[str, str]:
        """The carried state, as `gs.scale` takes it."""
        return {"w_next": "w", "w2_next": "w2"} if self.second else {"w_next": "w"}

    def model(self) -> onnx.ModelProto:
        """The step, its state with initial values."""
        outputs = ["float[4,3] w_next", *(["float[4,3] w2_next"] if self.second else []), self.outputs]
        model = linear_step(
            self.more,
            inputs="float[4,3] w" + (", float[4,3] w2" if self.second else ""),
            outputs=", ".join(filter(None, outputs)),
            constants=CONSTANTS,
            forward=f"""{self.seen}
                y = MatMul(x, {"seen" if self.seen else "w"})
                d = Sub(y, t)
                square = Mul(d, d)
                loss = ReduceMean<keepdims = 0>(square)
            """,
        )
        random = np.random.default_rng(5)
        state = {name: random.standard_normal((4, 3)).astype(np.float32) for name in self.updates.values()}
        return with_initializers(model, state)


def _metric(nodes: str, shape: str = "4,3") -> Case:
    """SGD, and a further output that reads the weight from before the step."""
    return Case(f"{SGD}  {nodes}", f"float[{shape}] metric")


def _seen(nodes: str) -> Case:
    """The forward pass and a metric read the weight through nodes that ONNX Runtime may remove.

    The node that reads the weight comes before the update; the metric need not.
    """
    return Case(f"{SGD}  metric = Exp(seen)", seen=nodes)


_BRANCHES = "<then_branch = yes() => (float[4,3] a) {{a = {}}}, else_branch = no() => (float[4,3] b) {{b = Neg(w)}}>"
_TURNS = "<body = turn(int64 i, bool go, float[4,3] v) => (bool on, float[4,3] v2) {on = Identity(go)  v2 = Add(v, w)}>"
_ROTATED = "u0 = Mul(rate, dw)  u = Neg(u0)"

CASES = {
    "ordinary": Case(f"{SGD}  metric = Exp(dw)", shares=True),
    "metric": _metric("metric = Exp(w)"),
    "metric that is NaN": _metric("metric = Log(w)"),
    "metric unchanged": _metric("metric = Identity(w)"),
    "metric transposed": _metric("v = Transpose<perm = [1, 0]>(w)  metric = Exp(v)", "3,4"),
    "metric transposed twice": _metric(
        "a = Transpose<perm = [1, 0]>(w)  b = Transpose<perm = [1, 0]>(a)  metric = Concat<axis = 0>(b, b)", "8,3"
    ),
    "metric reshaped": _metric("v = Reshape(w, flat)  metric = Concat<axis = 0>(v, v)", "24"),
    "metric squeezed": _metric("a = Unsqueeze(w, axis)  b = Squeeze(a, axis)  metric = Exp(b)"),
    "metric in If": _metric(f"c = Less(loss, zero)  metric = If(c) {_BRANCHES.format('Exp(w)')}"),
    "metric in If without choice": _metric(f"metric = If(always) {_BRANCHES.format('Exp(w)')}"),
    "metric in Loop": _metric(f"metric = Loop(twice, always, dw) {_TURNS}"),
    "state as output": Case(SGD, "float[4,3] w"),
    "through Shape alone": Case(
        "e = Exp(w)  metric = Mul(e, half)  s = Shape(e)  u0 = Mul(rate, dw)  u = Expand(u0, s)  w_next = Sub(w, u)"
    ),
    "metric of the next": dataclasses.replace(_metric("metric = Exp(w_next)"), shares=True),
    "swapped": Case("u = Mul(rate, dw)  v = Sub(w, u)  w_next = Identity(w2)  w2_next = Identity(v)", "", second=True),
    "swapped by products": Case(
        "u = Mul(rate, dw)  v = Sub(w, u)  w_next = Mul(w2, half)  w2_next = Mul(v, one)", "", second=True
    ),
    "average of the old": Case(f"{SGD}  a = Mul(w2, half)  b = Mul(w, half)  w2_next = Add(a, b)", "", second=True),
    "average of the next": Case(
        "u = Mul(rate, dw)  w_next = Sub(w, u)  a = Mul(w2, half)  b = Mul(w_next, half)  w2_next = Add(a, b)",
        "",
        second=True,
        shares=True,
    ),
    "rows backwards": Case(
        "u = Mul(rate, dw)  r = Gather<axis = 0>(w, backwards)  w_next = Sub(r, u)", "", shares=True
    ),
    "MatMul last": Case("u = Mul(rate, dw)  v = Sub(w, u)  w_next = MatMul(q, v)", "", named=True, shares=True),
    "MatMul then Add": Case(f"{_ROTATED}  a = MatMul(q, w)  w_next = Add(a, u)", "", named=True, shares=True),
    "Gemm last": Case(f"{_ROTATED}  w_next = Gemm(q, w, u)", "", named=True, shares=True),
    "seen through Identity": _seen("seen = Identity(w)"),
    "seen through Cast": _seen("seen = Cast<to = 1>(w)"),
    "seen through float64": _seen("wide = Cast<to = 11>(w)  seen = Cast<to = 1>(wide)"),
    "seen through Dropout": _seen("seen = Dropout(w)"),
    "seen through times one": _seen("seen = Mul(w, one)"),
    "seen through one times": _seen("seen = Mul(one, w)"),
    "seen through by one": _seen("seen = Div(w, one)"),
    "seen through plus zero": _seen("seen = Add(w, zero)"),
    "seen through minus zero": _seen("seen = Sub(w, zero)"),
    "seen through If without choice": _seen(f"seen = If(always) {_BRANCHES.format('Identity(w)')}"),
    "seen through Optional": _seen("o = Optional(w)  seen = OptionalGetElement(o)"),
    "seen through transposed product": _seen(
        "a = Transpose<perm = [1, 0]>(w)  b = Mul(a, one)  seen = Transpose<perm = [1, 0]>(b)"
    ),
    "seen through Slice": _seen("seen = Slice(w, first, end, axis)"),
    "seen through Expand": _seen("seen = Expand(w, whole)"),
    "seen through Concat": _seen("seen = Concat<axis = 0>(w)"),
    "seen through Sum": _seen("seen = Sum(w)"),
    "seen through Max": _seen("seen = Max(w)"),
    "seen through Tile": _seen("seen = Tile(w, once)"),
    "seen through Pad": _seen("seen = Pad(w, nothing)"),
    "seen through Split": _seen("seen = Split<axis = 0, num_outputs = 1>(w)"),
    "seen through Clip": _seen("seen = Clip(w)"),
}
