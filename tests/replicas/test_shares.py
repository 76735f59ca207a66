"""The shares of ranks in a sharded update."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_ir import DataType

from graphscale.replicas.buckets import Gradient, in_stages, lay_out_shares
from graphscale.replicas.reduction import mean_and_check
from graphscale.replicas.shares import Shares, share_out, trust_replicas
from graphscale.replicas.splitting import Halves, cut_halves, open_step
from tests.replicas.steps import DIGITS, STEPS, scaled

pytestmark = pytest.mark.static


def shares(name: str, size: int) -> tuple[Halves, Shares]:
    model, _ = open_step(scaled(name).model)
    halves = cut_halves(model, name)
    trust_replicas(halves.update.graph, halves.stamp.names["all_finite"], name)
    given = {gradient.name: gradient for gradient in halves.gradients}
    return halves, share_out(halves.update.graph, given, halves.stamp.state, size, name)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_weight_its_gradient_and_its_moments_have_one_owner(name: str, size: int) -> None:
    halves, found = shares(name, size)
    gradients = {gradient.name: gradient for gradient in halves.gradients}
    # As many owners as replicas, and shares of gradients that are as even as whole tensors allow.
    loads = [sum(g.nbytes for g in gradients.values() if found.owners[g.name] == rank) for rank in range(size)]
    assert max(loads) - min(loads) <= max(gradient.nbytes for gradient in gradients.values())
    graph = halves.update.graph
    shapes = {value.name: value.shape for value in graph.inputs}
    tensors = [name for name in halves.stamp.carried if shapes[name] is not None and shapes[name].rank() > 0]
    assert set(tensors) <= set(found.owners)
    for node, (_, owner) in zip(graph, found.nodes, strict=True):
        read = {found.owners[v.name] for v in node.inputs if v is not None and v.name in found.owners}
        assert len(read) <= 1 and (not read or owner in read)


def test_nothing_is_exchanged_where_no_weight_needs_another_one() -> None:
    assert shares("pytorch/mlp_momentum", 2)[1].rounds == ()
    assert shares(DIGITS, 3)[1].rounds == ()


@pytest.mark.parametrize("name", ["pytorch/attention_adamw_clip", "jax/mlp_adamw_clip"])
def test_the_norm_of_all_gradients_is_exchanged_once(name: str) -> None:
    halves, found = shares(name, 3)
    assert len(found.rounds) == 1
    assert 3 <= len(found.rounds[0]) <= len(halves.gradients)


def test_buckets_of_shares_hold_whole_gradients_owner_after_owner() -> None:
    halves, found = shares("pytorch/attention_adamw_clip", 3)
    owners = {gradient.name: found.owners[gradient.name] for gradient in halves.gradients}
    buckets = lay_out_shares(in_stages(halves.gradients, 2), owners, 3, 3000)
    held = [segment.gradient for bucket in buckets for segment in bucket.segments]
    assert sorted(held) == sorted(owners)
    for bucket in buckets:
        ranks = [owners[segment.gradient] for segment in bucket.segments]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_stages_divide_gradients_in_their_order(size: int, count: int) -> None:
    rng = np.random.default_rng(size * count)
    gradients = [Gradient(f"g{i}", DataType.FLOAT, (int(rng.integers(0, 900)),)) for i in range(count)]
    if size > count:
        return
    stages = in_stages(gradients, size)
    assert [gradient for stage in stages for gradient in stage] == gradients
    assert len(stages) == size and all(stages)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_means_are_checked_element_by_element_where_a_sum_overflows(dtype: type) -> None:
    array = np.full(200_000, np.finfo(dtype).max, dtype)
    assert mean_and_check(array, 2) and (array == np.finfo(dtype).max / 2).all()
    for at in (0, 70_000, 199_999):
        for bad in (np.nan, np.inf, -np.inf):
            array = np.ones(200_000, dtype)
            array[at] = bad
            assert not mean_and_check(array, 3)
