"""Feeds of a run: data from files and its batches, constants, the learning rate; and wrong ones of each."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from graphscale.errors import GraphscaleError, TrainingError
from graphscale.session import InputSpec
from graphscale.training.batch_feeds import check_fed, find_rate_input, parse_feeds
from graphscale.training.data import Batches, Data, load_arrays
from tests.conftest import assert_all_same_bits

pytestmark = pytest.mark.static

FREE = {
    "x": InputSpec(np.dtype(np.float32), ("batch", 3)),
    "label": InputSpec(np.dtype(np.int64), ("batch",)),
    "rate": InputSpec(np.dtype(np.float32), ()),
}
FIXED = {"x": InputSpec(np.dtype(np.float32), (4, 3)), "label": InputSpec(np.dtype(np.int64), ("batch",))}
SEQUENCES = {
    "tokens": InputSpec(np.dtype(np.int64), ("batch", "length")),
    "mask": InputSpec(np.dtype(np.bool_), ("batch", "length")),
    "free": InputSpec(np.dtype(np.float32), (None, None)),
}


def arrays(samples: int = 10, **more: Any) -> dict[str, np.ndarray]:
    values = np.arange(3 * samples, dtype=np.float32).reshape(samples, 3)
    return {"x": values, "label": np.arange(samples, dtype=np.int64), **more}


def test_data_that_fits() -> None:
    assert Data.check(arrays(), FREE, "data.npz").batch_size is None
    assert Data.check(arrays(), FIXED, "data.npz").batch_size == 4
    assert Data.check(arrays(4), FIXED, "data.npz").samples == 4
    whole = {"tokens": np.zeros((5, 7), np.int64), "mask": np.ones((5, 7), bool), "free": np.ones((5, 2), np.float32)}
    assert Data.check(whole, SEQUENCES, "data.npz").samples == 5


Misfit = tuple[dict[str, np.ndarray], dict[str, InputSpec], str]


def misfit(message: str, samples: int = 10, inputs: dict[str, InputSpec] = FREE, **more: np.ndarray) -> Misfit:
    return arrays(samples, **more), inputs, message


LENGTHS = {"tokens": np.zeros((5, 7), np.int64), "mask": np.ones((5, 6), bool)}
TWO_BATCHES = {"x": FIXED["x"], "label": InputSpec(np.dtype(np.int64), (5,))}
MISFITS = {
    "nothing": ({}, FREE, "data.npz holds no array; the step is fed x, label, rate"),
    "unknown": misfit(
        "data.npz has an array 'y', but the step is fed x, label, rate; rename it, or ignore such arrays with "
        "--ignore-extra",
        y=np.zeros(10),
    ),
    "float64": misfit(
        "data.npz: 'x' is of dtype float64, and the step takes float32; convert it with .astype('float32')",
        x=np.zeros((10, 3)),
    ),
    "int32": misfit("data.npz: 'label' is of dtype int32, and the step takes int64", label=np.zeros(10, np.int32)),
    "axes": misfit("data.npz: 'x' has 3 axes, and the step takes 2: [samples, 3]", x=np.zeros((10, 3, 1), np.float32)),
    "no-axis": misfit("data.npz: 'x' is of dtype float64", x=np.ones(())),
    "scalar": misfit("data.npz: 'label' has 0 axes, and the step takes 1: [samples]", label=np.int64(3).reshape(())),
    "width": misfit(
        "data.npz: 'x' has shape [10, 4], and the step takes [samples, 3]", x=np.zeros((10, 4), np.float32)
    ),
    "for-a-scalar": misfit(
        "data.npz: 'rate' is an array, but the input is a scalar; give it with --feed NAME=VALUE",
        rate=np.zeros(10, np.float32),
    ),
    "counts": misfit("data.npz: 'x' has 10 samples, but 'label' has 9", label=np.zeros(9, np.int64)),
    "empty": misfit("data.npz has no samples: the first axis of 'x' is 0", 0),
    "too-few": misfit("data.npz has 3 samples, fewer than the 4 of the step's fixed batch", 3, FIXED),
    "two-batches": misfit(
        "the inputs of the step have different first axes: 'x' has 4, 'label' 5; the first axis of each array in the "
        "data "
        "must be the samples",
        inputs=TWO_BATCHES,
    ),
    "one-name-two-sizes": (
        LENGTHS,
        SEQUENCES,
        "data.npz: the axis 'length' has the size 7 in 'tokens', but 6 in 'mask'",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_data_that_does_not_fit(case: str) -> None:
    given, inputs, message = MISFITS[case]
    with pytest.raises(TrainingError) as error:
        Data.check(given, inputs, "data.npz")
    assert str(error.value).startswith(message)


def test_the_hash_is_of_the_content() -> None:
    def changed(change: Callable[[dict[str, np.ndarray]], Any]) -> str:
        given = arrays()
        change(given)
        return Data.check(given, FREE, "data.npz").sha256

    same = changed(lambda given: None)
    assert changed(lambda given: given.update(x=np.asfortranarray(given["x"]))) == same
    assert changed(lambda given: given.update(x=given.pop("x"))) == same, "the order in the file does not matter"
    assert changed(lambda given: given["x"].__setitem__((9, 2), 7)) != same
    assert changed(lambda given: given["x"].__setitem__((0, 0), -0.0)) != same, "by bits"
    assert changed(lambda given: given.pop("label")) != same


@given(
    samples=st.integers(1, 40),
    size=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    fixed=st.booleans(),
)
def test_an_epoch_has_every_sample_once(samples: int, size: int, seed: int, shuffle: bool, fixed: bool) -> None:
    if fixed and samples < size:
        return
    data = Data(arrays(samples), samples, size if fixed else None)
    batches = Batches(data, size, seed, shuffle)
    assert batches.per_epoch == (samples // size if fixed else math.ceil(samples / size))
    for epoch in range(2):
        numbers = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
        labels = [batches[number]["label"] for number in numbers]
        assert all(len(label) == size for label in labels[: None if fixed else -1])
        seen = np.concatenate(labels)
        assert len(set(seen.tolist())) == len(seen) == (samples // size * size if fixed else samples)
        order = np.random.default_rng([seed, epoch]).permutation(samples) if shuffle else np.arange(samples)
        assert seen.tolist() == order[: len(seen)].tolist(), "the order that the page promises"
        for number in numbers:
            assert np.array_equal(batches[number]["x"][:, 0], 3 * batches[number]["label"]), "samples stay together"


def test_a_batch_depends_on_its_number_alone() -> None:
    data = Data(arrays(50), 50, None)
    first, again = Batches(data, 8, seed=3), Batches(data, 8, seed=3)
    in_order = [first[number]["label"].tolist() for number in range(20)]
    backwards = [again[number]["label"].tolist() for number in reversed(range(20))]
    assert in_order == backwards[::-1]
    assert in_order[:7] != in_order[7:14], "epochs differ"
    assert Batches(data, 8, seed=4)[0]["label"].tolist() != in_order[0]


def test_a_batch_is_a_copy() -> None:
    batches = Batches(Data(arrays(), 10, None), 4, shuffle=False)
    batches[0]["x"][:] = np.nan
    assert np.isfinite(batches[0]["x"]).all()


def test_batch_sizes() -> None:
    free, fixed = Data(arrays(), 10, None), Data(arrays(), 10, 4)
    assert Batches(free).size == 32
    assert Batches(fixed).size == Batches(fixed, 4).size == 4
    with pytest.raises(TrainingError, match="--batch-size 5: the inputs of the step have a fixed batch of 4"):
        Batches(fixed, 5)
    for size in (0, -1):
        with pytest.raises(TrainingError, match=f"--batch-size {size}: expected 1 or more"):
            Batches(free, size)
    with pytest.raises(TrainingError, match="--seed -1: expected 0 or more"):
        Batches(free, seed=-1)


# --- files ------------------------------------------------------------------------------------------------------------

WHOLE = arrays(flag=np.ones(10, bool))


def test_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **WHOLE)
    np.savez_compressed(tmp_path / "b.npz", **WHOLE)
    save_file(WHOLE, tmp_path / "c.safetensors")
    np.savez(tmp_path / "d.npz", **{name: value.astype(value.dtype.newbyteorder(">")) for name, value in WHOLE.items()})
    for name in ("a.npz", "b.npz", "c.safetensors", "d.npz"):
        found = load_arrays(tmp_path / name)
        assert_all_same_bits(found, WHOLE)


def _damage(path: Path) -> None:
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 50)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    np.savez(path, **WHOLE)
    path.write_bytes(path.read_bytes()[:-40])


def _foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "no array")


def _one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "cannot read .*: No such file or directory"),
    "folder": (lambda path: path.mkdir(), "cannot read .*: it is a folder; name a file"),
    "empty": (lambda path: path.touch(), "seems to be an empty file; write it again"),
    "text": (lambda path: path.write_text("x,y\n1,2\n"), "seems to be text; name the right file"),
    "truncated": (_truncate, "damaged"),
    "damaged": (_damage, "'x' is damaged"),
    "foreign-zip": (_foreign_zip, "seems to be a zip archive; unpack it"),
    "one-array": (_one_array, "holds one array without a name; write numpy.savez"),
    "objects": (lambda path: np.savez(path, x=np.array([{}])), "'x' holds Python objects, not numbers"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_files(case: str, tmp_path: Path) -> None:
    make, message = FILES[case]
    path = tmp_path / "data.npz"
    make(path)
    with pytest.raises(TrainingError, match=message) as error:
        load_arrays(path)
    assert "data.npz" in str(error.value)


def test_bad_state_files(tmp_path: Path) -> None:
    for name, message in (("a.txt", r"expected an \.npz or a \.safetensors file"), ("b.safetensors", "damaged")):
        (tmp_path / name).write_bytes(b"\x00" * 20)
        with pytest.raises(GraphscaleError, match=message):
            load_arrays(tmp_path / name)


# --- constants and the learning rate ----------------------------------------------------------------------------------


def spec(dtype: object, *shape: int | str | None, optional: bool = False) -> InputSpec:
    return InputSpec(np.dtype(dtype), shape, optional)


INPUTS = {
    "x": spec(np.float32, "batch", 3),
    "rate": spec(np.float32),
    "half": spec(ml_dtypes.bfloat16, 1, 1),
    "count": spec(np.int8),
    "flag": spec(np.bool_, 1),
    "weights": spec(np.float32, 3),
}


def test_constants(tmp_path: Path) -> None:
    path = tmp_path / "weights.npy"
    np.save(path, np.arange(3, dtype=np.float32))
    found = parse_feeds(["rate=1e-3", "half=0.5", "count=-7", "flag=True", f"weights={path}"], INPUTS)
    assert found["rate"].dtype == np.float32
    assert found["rate"].shape == ()
    assert found["rate"] == np.float32(1e-3)
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["half"].tolist() == [[0.5]]
    assert found["count"] == -7
    assert found["flag"].tolist() == [True]
    assert found["weights"].tolist() == [0, 1, 2]
    assert parse_feeds(["flag=0"], INPUTS)["flag"].tolist() == [False]
    assert np.isinf(parse_feeds(["rate=inf"], INPUTS)["rate"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rate", "--feed rate: expected NAME=VALUE"),
        ("=1", "--feed =1: expected NAME=VALUE"),
        ("rate=", "--feed rate=: expected NAME=VALUE"),
        ("y=1", "--feed y=1: the step is fed x, rate, half, count, flag, weights, not 'y'"),
        ("rate=1 rate=2", "--feed rate=2: 'rate' is given twice"),
        ("rate=fast", "--feed rate=fast: 'fast' is no float32"),
        ("count=1.5", "--feed count=1.5: '1.5' is no int8"),
        ("count=200", "--feed count=200: '200' is no int8"),
        ("flag=2", "--feed flag=2: '2' is no bool"),
        ("weights=1", "--feed weights=1: the input has the shape [3]; give an array as NAME=FILE.npy"),
        ("x=1", "--feed x=1: the input has the shape ['batch', 3]"),
        ("weights=missing.npy", "--feed weights=missing.npy: cannot read missing.npy: No such file"),
        ("weights=wide.npy", "--feed weights=wide.npy: the array in wide.npy has shape [4], and the step takes [3]"),
        ("weights=double.npy", "--feed weights=double.npy: the array in double.npy is of dtype float64"),
        ("weights=text.npy", "--feed weights=text.npy: text.npy is damaged, or no .npy file"),
        ("weights=many.npy", "--feed weights=many.npy: many.npy is no .npy file of one array"),
    ],
)
def test_constants_that_do_not_fit(option: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("wide.npy", np.zeros(4, np.float32))
    np.save("double.npy", np.zeros(3))
    Path("text.npy").write_text("0 0 0")
    with Path("many.npy").open("wb") as file:
        np.savez(file, a=np.zeros(3, np.float32))
    with pytest.raises(TrainingError) as error:
        parse_feeds(option.split(), INPUTS)
    assert str(error.value).startswith(message)


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "many.npy"
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3, np.float32))
    with pytest.raises(TrainingError) as error:
        parse_feeds([f"weights={path}"], INPUTS)
    [archive] = [entry.locals["array"] for entry in error.traceback if "array" in entry.locals]
    assert archive.fid is None


def test_the_learning_rate_is_found() -> None:
    scalar, vector = spec(np.float32), spec(np.float32, 1)
    assert find_rate_input(None, {"x": INPUTS["x"], "learning_rate": scalar}, ["x"]) == "learning_rate"
    assert find_rate_input(None, {"lr": vector}, []) == "lr"
    assert find_rate_input(None, {"lr": spec(ml_dtypes.bfloat16)}, []) == "lr"
    assert find_rate_input(None, {"lr": scalar}, ["lr"]) is None, "the data gives it"
    assert find_rate_input(None, {"lr": spec(np.int64)}, []) is None
    assert find_rate_input(None, {"lr": spec(np.float32, 3)}, []) is None
    assert find_rate_input(None, {"LR": scalar}, []) is None
    assert find_rate_input("LR", {"LR": scalar}, []) == "LR"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eta", "--learning-rate-input eta: the step is fed x, rate"),
        ("weights", "--learning-rate-input weights: expected a floating-point scalar, but it is float32[3]"),
        ("count", "--learning-rate-input count: expected a floating-point scalar, but it is int8[]"),
        ("x", "--learning-rate-input x: the data or --feed feeds this input already"),
    ],
)
def test_an_input_that_takes_no_learning_rate(name: str, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        find_rate_input(name, INPUTS, ["x"])
    assert str(error.value).startswith(message)


def test_every_input_is_fed_once() -> None:
    inputs = {"x": INPUTS["x"], "rate": INPUTS["rate"], "extra": spec(np.float32, optional=True)}
    check_fed(inputs, ["x"], ["rate"], "data.npz")
    with pytest.raises(TrainingError) as error:
        check_fed(inputs, ["x"], [], "data.npz")
    assert str(error.value) == (
        "the step needs 'rate' (float32[]), which data.npz does not have; add the array, or give a constant with "
        "--feed rate=VALUE"
    )
    with pytest.raises(TrainingError, match=r"--feed x: data\.npz has an array of this name as well"):
        check_fed(inputs, ["x"], ["x", "rate"], "data.npz")
