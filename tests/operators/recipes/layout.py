"""Operators that move elements, or choose among them."""

from __future__ import annotations

import math

import numpy as np

from tests.operators.recipes.draw import Call, Draw, onnx_type, recipe


def _axes_call(draw: Draw, x: np.ndarray, axes: list[int], since: int) -> Call:
    """Hand axes over as an attribute, or, from an opset on, as an operand."""
    if draw.opset < since:
        return Call([x], {"axes": axes})
    return Call([x, np.asarray(axes, np.int64)])


@recipe("Reshape")
def draw_reshape(draw: Draw) -> Call:
    shape = draw.shape()
    target = list(shape)
    draw.choices.shuffle(target)
    if target and draw.chance(40) and 0 not in target:
        target[draw.choices.randrange(len(target))] = -1
    attributes = {"allowzero": 1} if draw.opset >= 14 and (0 in shape or draw.chance(30)) else {}
    return Call([draw.floats(shape), np.asarray(target, np.int64)], attributes)


@recipe("Flatten")
def draw_flatten(draw: Draw) -> Call:
    shape = draw.shape()
    low = -len(shape) if draw.opset >= 11 else 0
    return Call([draw.floats(shape)], draw.options(axis=(draw.size(low, len(shape)),)))


@recipe("Transpose")
def draw_transpose(draw: Draw) -> Call:
    shape = draw.shape()
    order = list(range(len(shape)))
    draw.choices.shuffle(order)
    return Call([draw.floats(shape)], draw.options(perm=(order,)))


@recipe("Squeeze")
def draw_squeeze(draw: Draw) -> Call:
    shape = list(draw.shape(1))
    axes = draw.axes(len(shape))
    for axis in axes:
        shape[axis] = 1
    if draw.chance(30):
        return Call([draw.floats(shape)])
    if draw.opset < 11:
        axes = [axis % len(shape) for axis in axes]
    return _axes_call(draw, draw.floats(shape), axes, 13)


@recipe("Unsqueeze")
def draw_unsqueeze(draw: Draw) -> Call:
    shape = draw.shape(0, 3)
    more = draw.size(1, 2)
    axes = draw.choices.sample(range(len(shape) + more), more)
    if draw.opset >= 11 and draw.chance(30):
        axes = [axis - len(shape) - more for axis in axes]
    return _axes_call(draw, draw.floats(shape), axes, 13)


recipe("Expand")(lambda draw: Call([draw.floats(draw.broadcast(x := draw.shape())), np.asarray(x, np.int64)]))
recipe("Tile")(
    lambda draw: Call([draw.floats(x := draw.shape(1)), draw.integers(0 if draw.chance(15) else 1, 4, (len(x),))])
)


@recipe("Slice")
def draw_slice(draw: Draw) -> Call:
    shape = draw.shape(1)
    axes = draw.axes(len(shape))
    dtype = draw.pick(np.int64, np.int32)
    starts, ends = (draw.integers(-4, 5, (len(axes),), dtype) for _ in range(2))
    steps = np.asarray([draw.pick(1, 1, 2, -1, -2) for _ in axes], dtype)
    operands = [draw.floats(shape), starts, ends, np.asarray(axes, dtype), steps]
    if draw.chance(30):
        operands = [operands[0], *(draw.integers(-4, 5, (len(shape),), dtype) for _ in range(2))]
    return Call(operands)


@recipe("Split")
def draw_split(draw: Draw) -> Call:
    shape = list(draw.shape(1))
    axis, parts = draw.axis(len(shape)), draw.size(1, 3)
    sizes = [draw.size(0 if draw.chance(20) else 1, 3) for _ in range(parts)]
    attributes = draw.options(axis=(axis,))
    axis = attributes.get("axis", 0)
    if draw.chance(40):
        shape[axis] = parts * draw.size(1, 2)
        if draw.opset >= 18:
            attributes["num_outputs"] = parts
        return Call([draw.floats(shape)], attributes, parts)
    shape[axis] = sum(sizes)
    if draw.opset < 13:
        return Call([draw.floats(shape)], {**attributes, "split": sizes}, parts)
    return Call([draw.floats(shape), np.asarray(sizes, np.int64)], attributes, parts)


@recipe("Gather")
def draw_gather(draw: Draw) -> Call:
    shape = draw.shape(1)
    attributes = draw.options(axis=(draw.axis(len(shape)),))
    size = shape[attributes.get("axis", 0)]
    index = draw.integers(-size if draw.opset >= 11 else 0, size, draw.shape(0, 2) if size else (0,))
    return Call([draw.floats(shape), index], attributes)


@recipe("GatherElements")
def draw_gather_elements(draw: Draw) -> Call:
    shape = draw.shape(1)
    attributes = draw.options(axis=(draw.axis(len(shape)),))
    size = shape[attributes.get("axis", 0)]
    places = [draw.size(0 if draw.chance(10) else 1, dim) if dim else 0 for dim in shape]
    return Call([draw.floats(shape), draw.integers(-size, size, places)], attributes)


@recipe("GatherND")
def draw_gather_nd(draw: Draw) -> Call:
    shape = draw.shape(1, empty=False)
    batch = draw.size(0, len(shape) - 1) if draw.opset >= 12 else 0
    depth = draw.size(1, len(shape) - batch)
    lead = (*shape[:batch], *draw.shape(0 if batch else 1, 2))
    index = np.stack([draw.integers(-dim, dim, lead) for dim in shape[batch : batch + depth]], -1)
    return Call([draw.floats(shape), index], {"batch_dims": batch} if draw.opset >= 12 else {})


@recipe("Compress")
def draw_compress(draw: Draw) -> Call:
    shape = draw.shape(1)
    attributes = draw.options(axis=(draw.axis(len(shape)),))
    size = shape[attributes["axis"]] if attributes else math.prod(shape)
    return Call([draw.floats(shape), draw.booleans((draw.size(0, size),))], attributes)


@recipe("Trilu")
def draw_trilu(draw: Draw) -> Call:
    x = draw.floats(draw.shape(2))
    k = np.asarray(draw.size(-3, 3), np.int64) if draw.chance(70) else None
    return Call([x, k], draw.options(upper=(0, 1)))


@recipe("DepthToSpace SpaceToDepth")
def draw_blocks(draw: Draw) -> Call:
    block, (n, c, h, w) = draw.size(1, 3), (draw.size(1, 2), draw.size(1, 2), draw.size(1, 3), draw.size(1, 3))
    attributes = draw.options(mode=("DCR", "CRD")) if draw.opset >= (28 if draw.op == "SpaceToDepth" else 11) else {}
    if draw.op == "SpaceToDepth":
        return Call([draw.floats((n, c, h * block, w * block))], {**attributes, "blocksize": block})
    return Call([draw.floats((n, c * block * block, h, w))], {**attributes, "blocksize": block})


@recipe("ReverseSequence")
def draw_reverse(draw: Draw) -> Call:
    shape = draw.shape(2, empty=False)
    batch = draw.size(0, 1)
    lengths = draw.integers(1, shape[1 - batch] + 1, (shape[batch],))
    return Call([draw.floats(shape), lengths], {"batch_axis": batch, "time_axis": 1 - batch})


@recipe("CenterCropPad")
def draw_crop(draw: Draw) -> Call:
    shape = draw.shape(1, empty=False)
    if draw.chance(40):
        return Call([draw.floats(shape), draw.integers(1, 6, (len(shape),))])
    axes = draw.axes(len(shape))
    return Call([draw.floats(shape), draw.integers(1, 6, (len(axes),))], {"axes": axes})


@recipe("Pad")
def draw_pad(draw: Draw) -> Call:
    shape = draw.shape(1, empty=False)
    mode = draw.word("constant", "constant", "edge", "reflect", *(("wrap",) if draw.opset >= 19 else ()))
    # ONNX Runtime reads beyond its memory where a negative pad leaves nothing, or another mode has negative pads.
    low = -1 if mode == "constant" and min(shape) > 2 else 0
    high = 1 if mode in ("reflect", "wrap") and min(shape) < 2 else 2
    attributes = {"mode": mode} if draw.chance(75) or mode != "constant" else {}
    value = draw.pick(0.0, 1.5, -2.0)
    if draw.opset < 11:
        pads = draw.integers(low, high, (2 * len(shape),)).tolist()
        return Call([draw.floats(shape)], {**attributes, "pads": pads, **draw.options(value=(value,))})
    axes = draw.axes(len(shape)) if draw.opset >= 18 and draw.chance() else None
    pads = draw.integers(low, high, (2 * len(shape if axes is None else axes),))
    constant = np.asarray(value, draw.dtype) if draw.chance(60) else None
    return Call([draw.floats(shape), pads, constant, None if axes is None else np.asarray(axes)], attributes)


@recipe("Concat")
def draw_concat(draw: Draw) -> Call:
    shape = list(draw.shape(1))
    axis = draw.axis(len(shape)) if draw.opset >= 11 else draw.size(0, len(shape) - 1)
    parts = []
    for _ in range(draw.size(1, 4)):
        shape[axis] = draw.size(0 if draw.chance(15) else 1, 3)
        parts.append(draw.floats(shape))
    return Call(parts, {"axis": axis})


@recipe("ScatterElements Scatter")
def draw_scatter_elements(draw: Draw) -> Call:
    shape = draw.shape(1, empty=False)
    attributes = draw.options(axis=(draw.axis(len(shape)) if draw.op != "Scatter" else draw.size(0, len(shape) - 1),))
    axis = attributes.get("axis", 0)
    places = [draw.size(1, dim) for dim in shape]
    index = draw.integers(0, shape[axis], places)
    if _reduce(draw, attributes) is None:
        index = np.argsort(draw.floats(shape), axis)[tuple(slice(size) for size in places)].astype(np.int64)
    return Call([draw.floats(shape), index, draw.floats(places)], attributes)


@recipe("ScatterND")
def draw_scatter_nd(draw: Draw) -> Call:
    shape = draw.shape(1, empty=False)
    depth, attributes = draw.size(1, len(shape)), {}
    count = draw.size(1, 3)
    if _reduce(draw, attributes) is None:
        count = min(count, shape[0])
        first = np.asarray(draw.choices.sample(range(shape[0]), count))
    else:
        first = draw.integers(0, shape[0], (count,))
    index = np.stack([first, *(draw.integers(0, dim, (count,)) for dim in shape[1:depth])], -1)
    return Call([draw.floats(shape), index, draw.floats((count, *shape[depth:]))], attributes)


def _reduce(draw: Draw, attributes: dict[str, object]) -> object:
    """Choose a reduction among those of the opset; without one, each place may be written once."""
    modes = {"Scatter": ["none"]}.get(draw.op, ["none", "add", "mul"] if draw.opset >= 16 else ["none"])
    if draw.opset >= 18 and len(modes) > 1:
        modes += ["max", "min"]
    mode = draw.pick(*modes)
    if mode != "none" or (draw.opset >= 16 and draw.op != "Scatter" and draw.chance(30)):
        attributes["reduction"] = mode
    return None if mode == "none" else mode


@recipe("OneHot")
def draw_one_hot(draw: Draw) -> Call:
    # ONNX Runtime 1.19 divides by the number of indices: the process dies where there are none.
    index = draw.integers(-3, 4, draw.shape(0, 3, empty=False))
    depth = np.asarray(draw.size(1, 4), np.int64)
    return Call([index, depth, draw.floats((2,))], draw.options(axis=(draw.axis(index.ndim + 1),)))


@recipe("TensorScatter")
def draw_tensor_scatter(draw: Draw) -> Call:
    batch, heads, length, width = (draw.size(1, 3) for _ in range(4))
    new = draw.size(1, length)
    mode = draw.options(mode=("linear", "circular"))
    most = length if mode.get("mode") == "circular" else length - new + 1
    start = draw.integers(0, most, (batch,)) if draw.chance(70) else None
    shape = [batch, heads, length, width]
    return Call([draw.floats(shape), draw.floats([batch, heads, new, width]), start], mode)


@recipe("EyeLike RandomNormalLike RandomUniformLike")
def draw_like(draw: Draw) -> Call:
    attributes = draw.options(dtype=(onnx_type(np.float32), onnx_type(np.float64)))
    if draw.op == "EyeLike":
        return Call([draw.floats((draw.size(), draw.size()))], {**attributes, **draw.options(k=(-1, 0, 2))})
    return Call([draw.floats(draw.shape())], {**attributes, "seed": 3.0})


@recipe("SequenceAt")
def draw_sequence_at(draw: Draw) -> Call:
    members = [draw.floats(draw.shape(2, 2)) for _ in range(draw.size(1, 3))]
    return Call([members, np.asarray(draw.axis(len(members)), np.int64)])


@recipe("ConcatFromSequence")
def draw_concat_sequence(draw: Draw) -> Call:
    shape, new = draw.shape(1, 3), draw.size(0, 1)
    members = [draw.floats(shape) for _ in range(draw.size(1, 3))]
    return Call([members], {"axis": draw.axis(len(shape)), **draw.options(new_axis=(new,))})


@recipe("SplitToSequence")
def draw_split_sequence(draw: Draw) -> Call:
    shape = draw.shape(1, empty=False)
    attributes = draw.options(axis=(draw.axis(len(shape)),), keepdims=(0, 1))
    size = shape[attributes.get("axis", 0)]
    split = draw.pick(None, np.asarray(draw.size(1, size), np.int64), np.asarray([1] * size, np.int64))
    return Call([draw.floats(shape), split], attributes)
