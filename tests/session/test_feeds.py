"""Feeds of a step: every form of array, without a copy where possible; feeds that do not fit."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from graphscale.session import InputSpec
from tests.build import linear_step
from tests.conftest import assert_all_same_bits, assert_same_bits, load_example
from tests.session.conftest import address
from tests.session.digits import BFLOAT16, SCALED, batch, first_state, make, refused
from tests.session.plain import PlainLoop

pytestmark = pytest.mark.sample(2)


class OnlyDLPack:
    """A tensor of another library, which has nothing but DLPack's protocol."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OlderDLPack(OnlyDLPack):
    """As before the protocol had versions."""

    def __dlpack__(self, stream: Any = None) -> Any:
        assert stream is None
        return self.array.__dlpack__()


def strided(array: np.ndarray) -> np.ndarray:
    """Every second row of a larger array."""
    wide = np.zeros((2 * array.shape[0], *array.shape[1:]), array.dtype)
    wide[::2] = array
    return wide[::2]


def backwards(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[::-1])[::-1]


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "by columns": np.asfortranarray,
    "strided": strided,
    "backwards": backwards,
    "read-only": read_only,
    "unaligned": unaligned,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "a subclass": lambda array: array.view(np.matrix) if array.ndim == 2 else array.view(np.recarray),
    "lists": lambda array: array.tolist(),
    "OrtValue": ort.OrtValue.ortvalue_from_numpy,
    "DLPack": OnlyDLPack,
    "DLPack by columns": lambda array: OnlyDLPack(np.asfortranarray(array)),
    "DLPack read-only": lambda array: OnlyDLPack(read_only(array)),
    "older DLPack": OlderDLPack,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["images", "labels"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_array(form: str, name: str) -> None:
    session, plain = make(), PlainLoop(SCALED, first_state(), None)
    for seed in range(3):
        feeds = batch(seed=seed)
        expected = plain.step(feeds)
        before = feeds[name].copy()
        given = FORMS[form](feeds[name])
        actual = session.step({**feeds, name: given})
        assert_all_same_bits(actual, expected)
        np.testing.assert_array_equal(feeds[name], before)
    assert_all_same_bits(session.state_dict(), plain.state)


@pytest.mark.parametrize("form", [float, int, np.float32, np.array, FORMS["OrtValue"], FORMS["DLPack"]])
def test_every_form_of_a_number(form: Callable[[np.ndarray], Any]) -> None:
    session, plain = make(), PlainLoop(SCALED, first_state(), None)
    for seed in range(3):
        feeds = {**batch(seed=seed), "learning_rate": np.array(1 if form is int else 0.05, np.float32)}
        expected, actual = plain.step(feeds), session.step({**feeds, "learning_rate": form(feeds["learning_rate"])})
        assert_same_bits(actual["loss"], expected["loss"], "loss")


def test_a_partial_batch() -> None:
    """Its axis has a name, and takes any size, from step to step."""
    session, plain = make(), PlainLoop(SCALED, first_state(), None)
    assert session.inputs["images"] == InputSpec(np.dtype(np.float32), ("batch", 64))
    assert session.inputs["learning_rate"] == InputSpec(np.dtype(np.float32), ())
    for rows in (16, 16, 5, 16, 1, 33, 16):
        feeds = batch(rows)
        expected, actual = plain.step(feeds), session.step(feeds)
        assert_all_same_bits(actual, expected)


def test_inputs_with_an_initializer_may_be_fed_or_not() -> None:
    model = linear_step(
        "u = Mul(rate, dw)  w_next = Sub(w, u)",
        inputs="float[4,3] w, float rate",
        outputs="float[4,3] w_next",
        constants="float rate = {0.25}",
    )
    result = gs.scale(model, updates={"w_next": "w"})
    w = np.ones((4, 3), np.float32)
    session = gs.Session(result, state={"w": w})
    assert session.inputs["rate"].optional
    assert not session.inputs["x"].optional
    feeds = {"x": np.ones((8, 4), np.float32), "t": np.zeros((8, 3), np.float32)}

    def moved(**more: Any) -> float:
        session.load_state_dict({**session.state_dict(), "w": w})
        session.step({**feeds, **more})
        return float((w - session.state_dict()["w"])[0, 0])

    plain = moved()
    assert plain > 0
    assert moved(rate=0.5) == pytest.approx(2 * plain)
    assert moved() == plain, "what was fed once does not stay"
    assert moved(rate=0.0) == 0


# --- without a copy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["array", "read-only", "OrtValue", "DLPack", "DLPack read-only", "older DLPack"])
def test_no_copy(form: str, bound: dict[str, int]) -> None:
    feeds, session = batch(), make()
    array = feeds["images"]
    given = array if form == "array" else FORMS[form](array)
    if form == "OrtValue":
        wanted = given.data_ptr()
    else:
        wanted = address(given if isinstance(given, np.ndarray) else given.array)
    session.step({**feeds, "images": given})
    assert bound["images"] == wanted


@pytest.mark.training
def test_onnx_runtime_itself_copies_no_array() -> None:
    """An operator that accumulates in place writes into the array that is fed."""
    example = load_example("ort/digits_mlp")
    session = gs.Session(gs.scale(example.model(), target="ort-training"))
    feeds = {name: value.copy() for name, value in example.feeds.items()}
    session.step(feeds)
    for name in example.after:
        assert (feeds[name] != example.feeds[name]).any(), name


def test_a_batch_can_be_changed_after_its_step() -> None:
    """A loader that fills one buffer again and again."""
    session, plain, buffers = make(), PlainLoop(SCALED, first_state(), None), batch()
    for seed in range(4):
        for name, value in batch(seed=seed).items():
            buffers[name][...] = value
        result, expected = session.step(buffers), plain.step(batch(seed=seed))
        for value in buffers.values():
            value[...] = 0
        assert_same_bits(result["loss"], expected["loss"], "loss")


def test_any_mapping_will_do() -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return batch()[name]

        def __iter__(self) -> Any:
            return iter(("labels", "learning_rate", "images"))

        def __len__(self) -> int:
            return 3

    assert_same_bits(make().step(Lazy())["loss"], make().step(batch())["loss"], "loss")


# --- feeds that do not fit: one clear line each, and nothing has changed ----------------------------------------------


class Broken(OnlyDLPack):
    """A tensor that cannot be handed over, and says so in two lines."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("cannot be exported\nreally")


class NoCapsule(OnlyDLPack):
    """A tensor that hands over something else."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.array


class Nowhere(OnlyDLPack):
    """A tensor without memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("no device\nno memory")


IMAGES = batch()["images"]
BAD_FEEDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "dtype": ({"images": IMAGES.astype(np.float64)}, ("images", "float64", "float32")),
    "whole numbers for floats": ({"images": IMAGES.astype(np.int32)}, ("images", "int32", "float32")),
    "smaller whole numbers": ({"labels": np.zeros(16, np.int32)}, ("labels", "int32", "int64")),
    "rank": ({"images": IMAGES[0]}, ("images", "1 ax", "2", "[batch, 64]")),
    "rank of a scalar": ({"learning_rate": np.ones(1, np.float32)}, ("learning_rate", "1 ax", "0")),
    "shape": ({"images": IMAGES[:, :63]}, ("images", "[16, 63]", "[batch, 64]")),
    "shape of an OrtValue": ({"images": ort.OrtValue.ortvalue_from_numpy(IMAGES[:, :63])}, ("images", "[16, 63]")),
    "dtype of an OrtValue": ({"labels": ort.OrtValue.ortvalue_from_numpy(IMAGES)}, ("labels", "float32", "int64")),
    "dtype by DLPack": ({"images": OnlyDLPack(IMAGES.astype(np.float64))}, ("images", "float64", "float32")),
    "shape by DLPack": ({"images": OnlyDLPack(IMAGES[:, :63])}, ("images", "[16, 63]")),
    "fractions for whole numbers": ({"labels": [0.5] * 16}, ("labels", "int64")),
    "floats for whole numbers": ({"labels": [1.0] * 16}, ("labels", "int64")),
    "too large a number": ({"learning_rate": 1e300}, ("learning_rate", "float32")),
    "complex": ({"learning_rate": 1j}, ("learning_rate", "complex")),
    "ragged lists": ({"images": [[1.0, 2.0], [3.0]]}, ("images", "float32")),
    "lists of text": ({"labels": ["3"] * 16}, ("labels", "int64")),
    "text": ({"images": "images.npy"}, ("images", "str", "numpy")),
    "None": ({"images": None}, ("images", "NoneType", "numpy")),
    "Decimal": ({"learning_rate": decimal.Decimal(1)}, ("learning_rate", "Decimal")),
    "objects": ({"images": IMAGES.astype(object)}, ("images", "object", "float32")),
    "an array of text": ({"images": IMAGES.astype(str)}, ("images", "float32")),
    "what DLPack cannot hand over": ({"images": Broken(IMAGES)}, ("images", "DLPack", "cannot be exported")),
    "a tensor without a device": ({"images": Nowhere(IMAGES)}, ("images", "DLPack", "no device")),
    "no capsule": ({"images": NoCapsule(IMAGES)}, ("images", "DLPack")),
    "a name almost right": ({"image": IMAGES}, ("image", "did you mean 'images'")),
    "a name of nothing": ({"zebra": IMAGES}, ("zebra", "images, labels, learning_rate")),
    "a name that is no text": ({5: IMAGES}, ("5",)),
    "carried state": ({"fc1.weight": np.zeros((128, 64), np.float32)}, ("fc1.weight", "carried")),
    "the loss scale": ({"current_loss_scale": 2.0}, ("current_loss_scale", "carried")),
    "an output": ({"loss": 2.0}, ("no input 'loss'",)),
}


@pytest.fixture(scope="module")
def session() -> gs.Session:
    session = make()
    session.step(batch())
    return session


@pytest.mark.parametrize("case", BAD_FEEDS)
def test_a_bad_feed_is_one_clear_line_and_changes_nothing(
    case: str, session: gs.Session, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong, fragments = BAD_FEEDS[case]
    before, good_steps = session.state_dict(), session.good_steps
    with refused(SessionError, fragments):
        session.step({**batch(), **wrong})
    assert_all_same_bits(session.state_dict(), before)
    assert session.step(batch()).applied
    assert session.good_steps == good_steps + 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("left_out", ["images", "labels", "learning_rate"])
def test_a_missing_feed(left_out: str, session: gs.Session) -> None:
    with pytest.raises(SessionError, match=f"needs a feed for '{left_out}'"):
        session.step({name: value for name, value in batch().items() if name != left_out})
    with pytest.raises(SessionError, match="needs a feed for 'images', 'labels', 'learning_rate'"):
        session.step({})


@pytest.mark.parametrize("feeds", [None, [("images", IMAGES)], IMAGES, "images", 5], ids=str)
def test_feeds_that_are_no_mapping(feeds: Any, session: gs.Session) -> None:
    with pytest.raises(SessionError, match="feeds"):
        session.step(feeds)


def test_bfloat16_of_numpy_is_taken_or_refused_clearly() -> None:
    """The Python API of ONNX Runtime takes it since 1.20 or so; before, as a tensor of another library alone."""
    session = gs.Session(gs.scale(BFLOAT16, 1024), state={"w": np.ones((4, 3), np.float32)})
    feeds = {"x": np.ones((8, 4), np.float32), "t": np.ones((8, 3), np.float32)}
    note = np.array([[1, 2, 3], [4, 5, 6]], ml_dtypes.bfloat16)
    if hasattr(ort.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        assert session.step({**feeds, "note": note})["total"] == 21
    else:
        with refused(SessionError, ("note", "bfloat16")):
            session.step({**feeds, "note": note})
    with refused(SessionError, ("note", "float32", "bfloat16")):
        session.step({**feeds, "note": note.astype(np.float32)})


def test_state_of_bfloat16_is_refused_clearly() -> None:
    model = linear_step(
        "u = Mul(rate, dw)  w_next = Sub(w, u)  n2 = Identity(n)",
        inputs="float[4,3] w, bfloat16[2] n",
        outputs="float[4,3] w_next, bfloat16[2] n2",
        constants="float rate = {0.1}",
    )
    result = gs.scale(model, 1024, updates={"w_next": "w", "n2": "n"})
    with pytest.raises(SessionError, match=r"'n'.*bfloat16"):
        gs.Session(result, state={"w": np.ones((4, 3), np.float32), "n": np.ones(2, ml_dtypes.bfloat16)})
