"""Each replica's share of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphscale.errors import TrainingError
from graphscale.replicas.replica_world import Share, map_npz
from graphscale.training.data import Batches, Data

pytestmark = pytest.mark.static


def data(samples: int, fixed: int | None = None) -> Data:
    rng = np.random.default_rng(3)
    return Data({"x": rng.random((samples, 3)), "y": rng.integers(0, 9, samples)}, samples, fixed)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_shares_are_the_batch_of_one_process(replicas: int, shuffle: bool) -> None:
    found = data(60)
    whole = Batches(found, 24, 7, shuffle)
    shares = [Share(found, 24, 7, shuffle, rank, replicas) for rank in range(replicas)]
    assert {share.per_epoch for share in shares} == {whole.per_epoch}
    for number in range(2 * whole.per_epoch):
        for name, expected in whole[number].items():
            np.testing.assert_array_equal(np.concatenate([share[number][name] for share in shares]), expected)


def test_samples_that_cannot_be_divided_are_left_out() -> None:
    shares = [Share(data(29), 12, 0, False, rank, 3) for rank in range(3)]
    assert [len(share[2]["x"]) for share in shares] == [1, 1, 1]
    assert Share(data(26), 12, 0, False, 0, 3).per_epoch == 2


def test_a_fixed_batch_is_that_of_each_replica() -> None:
    share = Share(data(50, fixed=8), None, 0, True, 1, 3)
    assert (share.size, share.per_epoch, len(share[0]["x"])) == (24, 2, 8)
    with pytest.raises(TrainingError, match="fixed batch of 8, and 3 replicas take 24"):
        Share(data(50, fixed=8), 8, 0, True, 1, 3)


@pytest.mark.parametrize(("size", "fitting"), [(30, "28 or 32"), (2, "take 4$")])
def test_a_batch_that_cannot_be_divided_is_refused(size: int, fitting: str) -> None:
    with pytest.raises(TrainingError, match=f"cannot be divided among 4 replicas; .*{fitting}"):
        Share(data(100), size, 0, True, 0, 4)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(TrainingError, match="too few"):
        Share(data(3), 8, 0, True, 0, 4)


def test_arrays_are_mapped_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    arrays = {
        "c": np.arange(12.0).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "flags": np.asarray([True, False]),
    }
    np.savez(path, **arrays)
    found = map_npz(path)
    assert all(isinstance(array, np.memmap) for array in found.values())
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_what_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "small.npz", x=np.arange(5))
    np.savez(tmp_path / "scalar.npz", x=np.float32(3), y=np.zeros((0, 2)))
    assert map_npz(tmp_path / "small.npz")["x"].tolist() == list(range(5))
    assert map_npz(tmp_path / "scalar.npz")["x"] == 3


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrainingError, match="damaged"):
        map_npz(path)
    path.write_bytes(content[:300])
    with pytest.raises(TrainingError, match="damaged"):
        map_npz(path)
    with pytest.raises(TrainingError, match="cannot read"):
        map_npz(tmp_path / "missing.npz")
