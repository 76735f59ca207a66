"""Steps whose roles were asked about with a wrong proposal, by kind, each with its pairs of state."""

from __future__ import annotations

from typing import NamedTuple

import onnx

from tests.build import listed, parse

FORWARD = "p = MatMul (x, w) d = Sub (p, t)"
LOSS = "s = Mul (d, d) loss = ReduceMean <keepdims: int = 0> (s)"
BACKWARD = "dp = Mul (d, c) xt = Transpose <perm: ints = [1, 0]> (x) gw = MatMul (xt, dp)"
SGD = "u = Mul (gw, rate) w_next = Sub (w, u)"
# The same without names that say more.
UNNAMED = "u = Mul (gw, rate) y = Sub (w, u)"
NUMBERS = """float c = {0.083333336}, float rate = {0.1}, float beta = {0.9}, float share = {0.1}, int64[1] zero = {0},
    int64[1] two = {2}, int64[1] six = {6}, int64 unit = {1}, int64 five = {5}, int64 none = {0}"""


class Asked(NamedTuple):
    """A step, and its pairs of state `{output: input}`."""

    model: onnx.ModelProto
    pairs: dict[str, str]


def _updated(update: str, shape: str) -> str:
    return next((f"float[{shape}] {name}" for name in ("w_next", "y") if f"{name} =" in update), "")


def linear(
    text: str = "",
    inputs: str = "",
    outputs: str = "",
    *,
    forward: str = FORWARD,
    loss: str = LOSS,
    backward: str = BACKWARD,
    update: str = SGD,
) -> onnx.ModelProto:
    """A linear map with a mean squared error."""
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step ({listed("float[8,4] x, float[8,3] t, float[4,3] w", inputs)})
            => ({listed("float loss", _updated(update, "4,3"), outputs)})
            <{NUMBERS}>
        {{ {forward} {loss} {backward} {update} {text} }}
    """)


def rewards(
    text: str, outputs: str, update: str = SGD, inputs: str = "", live: str = "live = Identity (beta)"
) -> onnx.ModelProto:
    """A value function, learnt by temporal differences of rewards `r`."""
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step ({listed("float[8,4] x, float[8] r, float[8,4] x2, float[4,1] w", inputs)})
            => ({listed("float loss", _updated(update, "4,1"), outputs)})
            <{NUMBERS}, int64[1] last = {{1}}, int64[2] column = {{8, 1}}>
        {{
            q = MatMul (x, w) p = Squeeze (q, last) q2 = MatMul (x2, w) p2 = Squeeze (q2, last)
            {live} future = Mul (p2, live) target = Add (r, future) d = Sub (p, target) {LOSS}
            e = Mul (d, c) dp = Reshape (e, column) xt = Transpose <perm: ints = [1, 0]> (x) gw = MatMul (xt, dp)
            {update} {text}
        }}
    """)


W = {"w_next": "w"}


def queue(text: str, shape: str = "8,3", **more: str) -> Asked:
    """A step that keeps activations for the next one."""
    pairs = W if "update" not in more else {}
    outputs = f"float[{shape}] act_queue_next" + (", float[4,3] gw" if not pairs else "")
    return Asked(linear(text, f"float[{shape}] act_queue", outputs, **more), {**pairs, "act_queue_next": "act_queue"})


def quantizer(text: str) -> Asked:
    """A step with quantized weights, and the next step of the quantizer."""
    forward = "v = Div (w, q_step) n = Round (v) wq = Mul (n, q_step) p = MatMul (x, wq) d = Sub (p, t)"
    learnt = "off = Sub (n, v) go = Mul (gw, off) gq = ReduceSum <keepdims: int = 0> (go) uq = Mul (gq, rate)"
    model = linear(f"{learnt} {text}", "float q_step", "float q_step_next", forward=forward)
    return Asked(model, {**W, "q_step_next": "q_step"})


def number(text: str) -> Asked:
    """A step with a number `t`, whose next value is computed anew, or from the present one."""
    model = linear(f"{text}", "float k", "float k_next")
    for value in (*model.graph.input, *model.graph.output):
        value.name = {"t": "y", "k": "t", "k_next": "t_next"}.get(value.name, value.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [{"t": "y", "k": "t", "k_next": "t_next"}.get(name, name) for name in names]
    return Asked(model, {**W, "t_next": "t"})


SQUARE = "gg = Mul (gw, gw) sum = ReduceSum <keepdims: int = 0> (gg)"
LARGEST = "size = Abs (w_next) largest = ReduceMax <keepdims: int = 0> (size) q_step_next = Mul (largest, share)"
SHIFT = "tail = Slice (act_queue, two, six, zero) head = Slice (p, zero, two, zero)"
LOOKAHEAD = """
    fast = Sub (w, u) k_next = Add (k, unit) phase = Mod (k_next, five) meets = Equal (phase, none)
    w_next, slow_next = If (meets) <
        then_branch = meet () => (float[4,3] a, float[4,3] b)
            { far = Sub (fast, slow) step = Mul (far, share) b = Add (slow, step) a = Identity (b) },
        else_branch = go () => (float[4,3] e, float[4,3] f) { e = Identity (fast) f = Identity (slow) }
    >
"""
EWC = {
    "forward": """
        p = MatMul (x, w) d = Sub (p, t) moved = Sub (w, w_old) moved2 = Mul (moved, moved)
        kept = Mul (moved2, fisher) penalty = ReduceSum <keepdims: int = 0> (kept)
    """,
    "loss": "s = Mul (d, d) fit = ReduceMean <keepdims: int = 0> (s) loss = Add (fit, penalty)",
    "backward": BACKWARD.replace("gw =", "gf =") + " gk = Mul (moved, fisher) gk2 = Add (gk, gk) gw = Add (gf, gk2)",
}
OLD, OLDER = "float[4,3] w_old", "float[4,3] w_older"
ASKED = {
    # --- activations that are kept
    "activations in a queue": queue(f"{SHIFT} act_queue_next = Concat <axis: int = 0> (tail, head)", "6,3"),
    "activations in a slot": queue("act_queue_next = Tanh (p)"),
    "activations in a slot, gradients leave": queue("act_queue_next = Tanh (p)", update=""),
    "a slot with the prediction": queue("", forward="act_queue_next = MatMul (x, w) d = Sub (act_queue_next, t)"),
    "a slot that the loss reads": queue(
        "act_queue_next = Identity (q)",
        forward="q = MatMul (x, w) old = Mul (act_queue, share) p = Sub (q, old) d = Sub (p, t)",
    ),
    # --- temporal differences, and other residuals
    "differences": Asked(rewards("td_error = Identity (d)", "float[8] td_error"), W),
    "differences, gradients leave": Asked(rewards("td_error = Neg (d)", "float[8] td_error, float[4,1] gw", ""), {}),
    "differences of the other sign": Asked(rewards("td_error = Neg (d)", "float[8] td_error"), W),
    "differences, no names": Asked(rewards("o = Neg (d)", "float[8] o", UNNAMED), {"y": "w"}),
    "their targets, no names": Asked(rewards("o = Identity (target)", "float[8] o", UNNAMED), {"y": "w"}),
    "sizes of differences": Asked(rewards("td_error = Abs (d)", "float[8] td_error"), W),
    "differences beside ends of episodes": Asked(
        rewards("td_error = Neg (d)", "float[8] td_error", inputs="float[8] done", live="live = Sub (beta, done)"), W
    ),
    "a residual, no names": Asked(linear("o = Sub (t, p)", outputs="float[8,3] o", update=UNNAMED), {"y": "w"}),
    # --- differences of weights
    "a change of a weight": Asked(linear("delta_w = Sub (w_next, w)", outputs="float[4,3] delta_w"), W),
    "a change since the start": Asked(
        linear("delta_w = Sub (w_next, start)", "float[4,3] start", "float[4,3] delta_w"), W
    ),
    "a change that the host applies": Asked(
        linear(
            "o = Mul (m, beta) m_next = Add (o, gw) delta_w = Mul (m_next, share)",
            "float[4,3] m",
            "float[4,3] m_next, float[4,3] delta_w",
            update="",
        ),
        {"m_next": "m"},
    ),
    # --- steps of quantizers
    "a learnt step": quantizer("q_step_next = Sub (q_step, uq)"),
    "a step that is multiplied": quantizer("less = Neg (uq) f = Exp (less) q_step_next = Mul (q_step, f)"),
    "a step with a bound": quantizer("q1 = Sub (q_step, uq) q_step_next = Max (q1, share)"),
    "a step by the largest weight": quantizer(LARGEST),
    "an average step": quantizer(
        LARGEST.replace("q_step_next", "fresh") + " old = Mul (q_step, beta) q_step_next = Add (old, fresh)"
    ),
    # --- predictions
    "a prediction": Asked(linear(outputs="float[8,3] p"), W),
    "a prediction named after its target": Asked(linear("t_pred = Identity (p)", outputs="float[8,3] t_pred"), W),
    "a prediction by the next weight": Asked(linear("pred = MatMul (x, w_next)", outputs="float[8,3] pred"), W),
    "a prediction by the next weight, no names": Asked(
        linear("o = MatMul (x, y)", outputs="float[8,3] o", update=UNNAMED), {"y": "w"}
    ),
    "a prediction beside a mask": Asked(linear("pred = Mul (p, mask)", "float[8,3] mask", "float[8,3] pred"), W),
    # --- numbers named t
    "a count": number("k_next = Add (k, share)"),
    "a number of Nesterov's": number("kk = Mul (k, k) r = Sqrt (kk) k_next = Add (r, share)"),
    "a norm": number(f"{SQUARE} k_next = Sqrt (sum)"),
    "a number of the loss": number("k_next = Mul (loss, share)"),
    "a rate that the norm divides": number(f"{SQUARE} k_next = Div (rate, sum)"),
    # --- named well
    "lookahead in an If": Asked(
        linear(
            LOOKAHEAD,
            "float[4,3] slow, int64 k",
            "float[4,3] w_next, float[4,3] slow_next, int64 k_next",
            update="u = Mul (gw, rate)",
        ),
        {**W, "slow_next": "slow", "k_next": "k"},
    ),
    "elastic weights": Asked(
        linear(
            "w_old_next = Identity (w_old) fisher_next = Identity (fisher)",
            f"{OLD}, float[4,3] fisher",
            f"{OLD}_next, float[4,3] fisher_next",
            **EWC,
        ),
        {**W, "w_old_next": "w_old", "fisher_next": "fisher"},
    ),
    "elastic weights that move": Asked(
        linear(
            "a = Mul (w_old, beta) b = Mul (w_next, share) w_old_next = Add (a, b) gg = Mul (gf, gf)"
            " e = Mul (fisher, beta) f = Mul (gg, share) fisher_next = Add (e, f)",
            f"{OLD}, float[4,3] fisher",
            f"{OLD}_next, float[4,3] fisher_next",
            **EWC,
        ),
        {**W, "w_old_next": "w_old", "fisher_next": "fisher"},
    ),
    "the weights of two steps before": Asked(
        linear(
            "w_old_next = Identity (w) w_older_next = Identity (w_old)", f"{OLD}, {OLDER}", f"{OLD}_next, {OLDER}_next"
        ),
        {**W, "w_old_next": "w_old", "w_older_next": "w_older"},
    ),
}
