"""Nodes of the optimizer that stay outside of the branch of the update."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import feeds_for, linear_step
from tests.lowering.test_same_steps import assert_same_steps, plain_and_lowered, poisoned
from tests.session.plain import ALWAYS, lowered_graph

UPDATES = {
    "RandomNormal": "noise = RandomNormal <seed = 3.0, shape = [4, 3]> () v = Add(dw, noise) w_next = Sub(w, v)",
    "QuickGelu": "soft = com.microsoft.QuickGelu(dw) w_next = Sub(w, soft)",
}


@pytest.mark.parametrize("op_type", UPDATES)
def test_skipped_steps_run_them_too(op_type: str) -> None:
    """Random numbers go on, and what another domain's operators do is not known."""
    model = linear_step(UPDATES[op_type], outputs="float[4,3] w_next", domains=("com.microsoft",))
    model = onnx.shape_inference.infer_shapes(model)
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates={"w_next": "w"}, gradients=["dw"])
    feeds = feeds_for(model)
    plain, lowered, _ = plain_and_lowered(result, {"w": feeds.pop("w")}, ALWAYS)
    batches = [feeds, poisoned(feeds, np.nan), feeds]
    assert assert_same_steps(plain, lowered, batches) == [True, False, True]
    assert op_type in {node.op_type for node in lowered_graph(result)}
