"""A whole training run, 100 steps with overflows: the peers' loss scales, skipped steps and weights are ours.

Against recordings everywhere; against the living peers where PyTorch or TensorFlow is installed.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.differential.peers import NEEDS, PEERS, POLICIES
from tests.differential.training import PARAMETERS, RECORDED, RUNS, STEPS, Result, initial, ours

pytestmark = [pytest.mark.pytorch, pytest.mark.tensorflow]

# Of the largest weight: what 100 steps of float32 leave where sums are taken in another order.
TOLERANCE = 1e-6

each_peer = pytest.mark.parametrize("peer", PEERS)
each_run = pytest.mark.parametrize("name", RUNS)


@functools.cache
def recorded(peer: str) -> dict[str, Result]:
    with np.load(RECORDED / f"{peer}.npz") as stored:
        arrays = dict(stored)
    return {
        name: Result.of({key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(name)})
        for name in RUNS
    }


def assert_same_run(actual: Result, expected: Result) -> None:
    np.testing.assert_array_equal(actual.applied, expected.applied)
    np.testing.assert_array_equal(actual.scales, expected.scales)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    for name in PARAMETERS:
        largest = np.abs(expected.weights[name]).max()
        np.testing.assert_allclose(actual.weights[name], expected.weights[name], rtol=0, atol=TOLERANCE * largest)


@each_run
@each_peer
def test_recorded(peer: str, name: str) -> None:
    assert_same_run(ours(POLICIES[peer](RUNS[name]), RUNS[name]), recorded(peer)[name])


@each_run
@each_peer
def test_living(peer: str, name: str) -> None:
    pytest.importorskip(NEEDS[peer], reason=f"needs {NEEDS[peer]}; its recorded runs are tested without it")
    actual = PEERS[peer](RUNS[name])
    assert_same_run(ours(POLICIES[peer](RUNS[name]), RUNS[name]), actual)
    assert_same_run(recorded(peer)[name], actual)


@each_peer
def test_the_recordings_are_worth_comparing(peer: str) -> None:
    """Steps are skipped where batches are bad, and only there; at the limit the scale itself is what overflows."""
    runs = recorded(peer)
    bad = RUNS["bad batches"]
    assert np.flatnonzero(~runs["bad batches"].applied).tolist() == list(bad.spoiled)
    assert len(np.unique(runs["bad batches"].scales)) >= 5
    limit = runs["at the limit of float32"]
    assert np.isfinite(limit.losses).all() and 5 <= (~limit.applied).sum() <= STEPS // 3
    assert limit.scales.max() == 2.0**127 and not limit.applied[1:][limit.scales[:-1] > 2.0**126].any()
    lowest = runs["down to one"].scales.min()
    assert lowest == 1 if peer == "tensorflow" else lowest < 1
    for run in runs.values():
        assert run.losses.shape == run.scales.shape == (STEPS,)
        good = run.losses[run.applied]
        assert good[-8:].mean() < 0.5 * good[:8].mean()
        for parameter, start in initial().items():
            assert np.abs(run.weights[parameter] - start).max() > 1e-3
