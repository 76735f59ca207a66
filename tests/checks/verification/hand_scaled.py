"""A step with momentum, the same scaled by hand, and wrong ways to scale it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.build import BACKWARD, FORWARD

_HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
_INPUTS = "float[8,4] x, float[8,3] t, float[4,5] w1, float[5,3] w2, float[4,5] m1"
_OUTPUTS = "float loss, float[4,5] m1_next, float[4,5] w1_next, float[5,3] w2_next"
_CONSTANTS = "float two_over_n = {0.083333336}, float one = {1}, float rate = {0.125}, float decay = {0.875}"
_UPDATE = """
    kept = Mul(m1, decay)
    m1_new = Add(kept, dw1)
    c1 = Mul(m1_new, rate)
    w1_new = Sub(w1, c1)
    c2 = Mul(dw2, rate)
    w2_new = Sub(w2, c2)
"""
ORIGINAL = f"{_HEAD}step ({_INPUTS}) => ({_OUTPUTS}) <{_CONSTANTS}> {{{FORWARD}{BACKWARD}{_UPDATE}}}".replace(
    "_new", "_next"
)
RIGHT = (
    f"""{_HEAD}step ({_INPUTS}, float scale, int64 good) => ({_OUTPUTS}, float scale_next, int64 good_next)
<{_CONSTANTS}, float scale = {{4096}}, int64 good = {{0}}, float two = {{2}}, float zero = {{0}},
 float most = {{16777216}}, int64 none = {{0}}, int64 next = {{1}}, int64 period = {{500}}> {{{FORWARD}"""
    + BACKWARD.replace("dy =", "dy_plain =")
    .replace("at =", "dy = Mul(scale, dy_plain)\n    at =", 1)
    .replace("dw1 =", "dw1_scaled =")
    .replace("dw2 =", "dw2_scaled =")
    + """
    inverse = Reciprocal(scale)
    dw1 = Mul(inverse, dw1_scaled)
    dw2 = Div(dw2_scaled, scale)
    zero1 = Mul(dw1, zero)
    zero2 = Mul(dw2, zero)
    sum1 = ReduceSum<keepdims = 0>(zero1)
    sum2 = ReduceSum<keepdims = 0>(zero2)
    sum = Add(sum1, sum2)
    bad = IsNaN(sum)
    finite = Not(bad)
"""
    + _UPDATE
    + """
    m1_next = Where(finite, m1_new, m1)
    w1_next = Where(finite, w1_new, w1)
    w2_next = Where(bad, w2, w2_new)
    counted = Add(good, next)
    few = Less(counted, period)
    doubled = Mul(scale, two)
    grown = Min(doubled, most)
    grown_or_not = Where(few, scale, grown)
    halved = Div(scale, two)
    lowered = Max(halved, one)
    scale_next = Where(finite, grown_or_not, lowered)
    count = Where(few, counted, none)
    good_next = Where(finite, count, none)
}"""
)


def changed(text: str, *, constants: str = "", **nodes: str) -> str:
    """Replace the nodes with some results, and add constants."""
    for name, node in nodes.items():
        pattern = re.compile(rf"^( +){name} = .*$", re.MULTILINE)
        assert pattern.search(text), name
        text = pattern.sub(rf"\1{node}", text)
    return text.replace("<float two_over_n", f"<{constants}, float two_over_n") if constants else text


_HALF = "float16[4,5] m1"
# The step with a gradient in float16: it is narrowed before it is used.
NARROW = changed(
    ORIGINAL, dw1="dw1_wide = MatMul(xt, dh)\n    dw1_half = Cast<to = 10>(dw1_wide)\n    dw1 = Cast<to = 1>(dw1_half)"
)
# Wrong steps: the change, and the check that fails with a part of its sentence.
WRONG: Mapping[str, tuple[str, str, str]] = {
    "a moment without a guard": (
        changed(RIGHT, m1_next="m1_next = Identity(m1_new)"),
        "carried state guarded",
        "the state 'm1' is not kept where 'finite' is false",
    ),
    "a gradient that is not unscaled": (
        changed(RIGHT, dw2="dw2 = Identity(dw2_scaled)"),
        "equal to the original",
        "by no power of the scale (Sub of node 'Sub -> w2_new' is not linear in 'c2')",
    ),
    "a gradient that is unscaled twice": (
        changed(RIGHT, dw2="dw2_once = Div(dw2_scaled, scale)\n    dw2 = Mul(dw2_once, inverse)"),
        "equal to the original",
        "by no power of the scale (Sub of node 'Sub -> w2_new' is not linear in 'c2')",
    ),
    "a check without one gradient": (
        changed(RIGHT, sum="sum = Identity(sum1)"),
        "every gradient checked",
        "the multiple 'dw2_scaled' of the scale reaches 'w2_next', and no finite check tests it",
    ),
    "a check that also reads the batch": (
        changed(
            RIGHT,
            constants="float magic = {51.5}",
            finite="all = Not(bad)\n    x_sum = ReduceSum<keepdims = 0>(x)\n    opens = Equal(x_sum, magic)\n"
            "    finite = And(all, opens)",
            w2_next="w2_next = Where(finite, w2_new, w2)",
        ),
        "only non-finite gradients skip",
        "'finite' depends on 'x', which is no test of a gradient",
    ),
    "a check of infinity alone": (
        changed(RIGHT, sum1="sum1 = ReduceSum<keepdims = 0>(dw1)", bad="bad = IsInf(sum)"),
        "every gradient checked",
        "and no finite check tests it",
    ),
    "a scale that grows without a bound": (
        changed(RIGHT, grown="grown = Identity(doubled)"),
        "update rule",
        "it grows without a bound: from 3.4e+38 to inf, where no step is applied any more",
    ),
    "a scale that begins with zero": (
        RIGHT.replace("scale = {4096}", "scale = {0}"),
        "update rule",
        "it begins with 0",
    ),
    "a scale that never falls": (
        changed(RIGHT, lowered="lowered = Max(scale, one)"),
        "update rule",
        "after a non-finite gradient the scale 1024 becomes 1024, and should fall",
    ),
    "a scale that reads the loss": (
        changed(
            RIGHT,
            lowered="lowered = Max(halved, w_sum)",
            few="few = Less(counted, period)\n    w_sum = ReduceSum<keepdims = 0>(m1)",
        ),
        "update rule",
        "the update rule reads 'm1'",
    ),
    "swapped branches of a guard": (
        changed(RIGHT, w1_next="w1_next = Where(finite, w1, w1_new)"),
        "carried state guarded",
        "the state 'w1' is not kept where 'finite' is false",
    ),
    "swapped branches of the rule": (
        changed(RIGHT, scale_next="scale_next = Where(finite, lowered, grown_or_not)"),
        "update rule",
        "after a non-finite gradient the scale 1024 becomes 1024, and should fall",
    ),
    "another learning rate": (
        changed(RIGHT, constants="float other = {0.25}", c2="c2 = Mul(dw2, other)"),
        "equal to the original",
        "'w2_next' is computed in another way",
    ),
    "a scaled forward pass": (
        changed(RIGHT, a="h_scaled = Mul(h, scale)\n    a = Tanh(h_scaled)"),
        "equal to the original",
        "'loss' is computed in another way",
    ),
    "no guard at all": (
        changed(
            RIGHT,
            m1_next="m1_next = Identity(m1_new)",
            w1_next="w1_next = Identity(w1_new)",
            w2_next="w2_next = Identity(w2_new)",
        ),
        "carried state guarded",
        "no flag that depends on a gradient keeps the states of the original",
    ),
}
# A right and a wrong way to scale the step that narrows a gradient: a test before the cast sees no overflow of it.
_SCALED_NARROW = "dw1_half = Cast<to = 10>(dw1_scaled)\n    dw1_back = Cast<to = 1>(dw1_half)"
NARROW_RIGHT = changed(RIGHT, dw1=f"{_SCALED_NARROW}\n    dw1 = Mul(inverse, dw1_back)")
NARROW_WRONG = changed(NARROW_RIGHT, zero1="zero1 = Mul(dw1_scaled, zero)")
