"""Operators that move elements."""

from __future__ import annotations

import numpy as np

from tests.passes.training_ops.forward.node import UNKNOWN, floats, forward, integers, microsoft

# Their gradients are of operators of ONNX.
forward("ScatterElements", floats(3, 4), integers([0, 2, 1, 1]), floats(1, 4), axis=0)
forward("ScatterND", floats(3, 4), integers([0], [2]), floats(2, 4))
forward("Split", floats(4, 6), outputs=2, axis=1)
forward("Pad", floats(2, 3), integers(0, 1, 2, 0), constants=(1,))
forward("Trilu", floats(2, 4, 4), upper=1)
forward("Trilu", floats(2, 4, 4), np.asarray(-1, np.int64), name="shifted", constants=(1,), upper=0)
forward("Transpose", floats(2, 3, 4), perm=[1, 2, 0])
forward("Squeeze", floats(2, 1, 3), integers(1), constants=(1,))
forward("Squeeze", floats(2, 1, 3), name="opset 12", axes=[1], opset=12)
forward("Squeeze", floats(2, 1, 3), name="all")
forward("Unsqueeze", floats(2, 3), integers(1), constants=(1,))
forward("Unsqueeze", floats(2, 3), name="opset 12", axes=[1], opset=12)
forward("Reshape", floats(2, 6), integers(4, 3), constants=(1,))
forward("Flatten", floats(2, 3, 4))

forward("Gather", floats(5, 3), integers(0, 2, 2, 4), torch=lambda t, x, i: x[i])
forward("Gather", floats(2, 5, 3), integers([0, 2], [2, -1]), name="inside", torch=lambda t, x, i: x[:, i], axis=1)
forward("Gather", floats(300, 3), integers(7, 299, 7), name="many rows", torch=lambda t, x, i: x[i])
forward("GatherElements", floats(3, 4), integers([0, 2, 2, 1]), torch=lambda t, x, i: x.gather(0, i), axis=0)
forward("GatherND", floats(3, 4, 2), integers([0, 1], [2, 3], [0, 1]), torch=lambda t, x, i: x[i[:, 0], i[:, 1]])
forward(
    "GatherND",
    *(floats(3, 4, 2), integers([1], [0], [3])),
    name="batches",
    torch=lambda t, x, i: x[t.arange(3), i[:, 0]],
    batch_dims=1,
)
microsoft("ShrunkenGather", floats(5, 3), integers(0, 2, 4), torch=lambda t, x, i: x[i], axis=0)
SLICES = {
    "": (([1], [4], [1], [1]), lambda t, x: x[:, 1:4]),
    "two axes": (([1, -3], [3, 100], [0, 1], [1, 2]), lambda t, x: x[1:3, -3::2]),
    "backwards": (([-1], [-100], [1], [-2]), lambda t, x: x.flip(1)[:, ::2]),
}
for name, (bounds, piece) in SLICES.items():
    forward(
        "Slice",
        *(floats(4, 6), *(integers(*numbers) for numbers in bounds)),
        name=name,
        constants=(1, 2, 3, 4),
        torch=lambda t, x, *_, piece=piece: piece(t, x),
    )
for opset in (12, 17):
    name = f"opset {opset}"
    forward(
        "Concat", floats(2, 3), floats(2, 4), name=name, torch=lambda t, x, y: t.cat((x, y), 1), opset=opset, axis=1
    )
    for shapes, options in ((f"{UNKNOWN}, ", {"shapes": UNKNOWN, "varied": (0,)}), ("", {"constants": (1,)})):
        tile, expand = (lambda t, x, _: x.tile(2, 3)), (lambda t, x, _: x.expand(4, 2, 5, 3))
        forward("Tile", floats(2, 3), integers(2, 3), name=shapes + name, torch=tile, opset=opset, **options)
        sizes = integers(4, 2, 5, 3)
        forward("Expand", floats(2, 1, 3), sizes, name=shapes + name, torch=expand, opset=opset, **options)
microsoft("ConcatTraining", floats(2, 3), floats(2, 4), torch=lambda t, x, y: t.cat((x, y), 1), outputs=2, axis=1)
forward("TopK", floats(3, 5), integers(2), constants=(1,), torch=lambda t, x, _: x.topk(2, 1)[0], outputs=2, axis=1)
microsoft("FlattenAndUnpad", floats(2, 3, 4), integers(0, 2, 5), torch=lambda t, x, i: x.flatten(0, 1)[i], outputs=2)
microsoft(
    "PadAndUnflatten",
    *(floats(3, 4), integers(0, 2, 5), integers(2, 3)),
    torch=lambda t, x, i, _: t.zeros(6, 4, dtype=x.dtype).index_put((i,), x).view(2, 3, 4),
)
