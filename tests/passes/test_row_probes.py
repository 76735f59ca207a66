"""The finite check of target ort-cuda: products with zeros in rows, and sums of eight."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.checks.verification.finite_check import find_tested_values
from graphscale.graph.builder import PASS_KEY, Editor
from graphscale.passes import CheckFinite, GuardUpdates, LowerTrainingOps
from graphscale.passes.nodes import row_widths as sizes
from graphscale.passes.nodes.finite import all_finite
from graphscale.passes.nodes.row_widths import row_widths
from graphscale.targets import get_target
from tests.build import step
from tests.conftest import MODEL_NAMES, ROOT, load_example, make_session

pytestmark = pytest.mark.sample(1)

Shape = Sequence[int | str]

# Each sits in one element, among numbers that are all finite.
BAD = (np.nan, np.inf, -np.inf)
# Sums of them overflow; the last two are the smallest subnormal number and a zero of the other sign.
FINITE = np.array([3e38, -3e38, np.finfo(np.float32).max, 1e30, 1.0, -1e-30, 1e-45, -0.0], np.float32)


def check_of(shapes: Sequence[Shape], dtype: ir.DataType = ir.DataType.FLOAT, target: str = "ort-cuda") -> ir.Model:
    """A graph of the finite check alone: inputs `g0`, `g1`, ..., output `all_finite`."""
    gradients = [ir.val(f"g{i}", dtype, ir.Shape(shape)) for i, shape in enumerate(shapes)]
    graph = ir.Graph(gradients, [], nodes=[], opset_imports={"": 18}, name="check")
    graph.outputs.append(all_finite(Editor(graph).builder(CheckFinite.name), gradients, get_target(target)))
    return ir.Model(graph, ir_version=10)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def random_shapes(random: np.random.Generator, count: int) -> list[list[int]]:
    """Shapes of ranks 0 to 4, of 1 to some hundred elements; some with a prime number of them."""
    shapes = [random.integers(1, 7, size=random.integers(0, 5)).tolist() for _ in range(count)]
    return [shape if random.random() < 0.8 else [101] for shape in shapes]


def finite_numbers(random: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(random.choice(FINITE, size=shape), np.float32)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of gradients as small as those of a test."""
    monkeypatch.setattr(sizes, "_WIDTHS", np.arange(64, 1, -1))
    for name, value in (("_FEWEST_ROWS", 2), ("_MOST_ROWS", 90), ("_SHORT", 5)):
        monkeypatch.setattr(sizes, name, value)


@pytest.mark.parametrize("count", range(1, 21))
def test_every_element_is_seen(count: int, small_rows: None) -> None:
    random = np.random.default_rng(count)
    shapes = random_shapes(random, count)
    session = make_session(ir.to_proto(check_of(shapes)))
    feeds = {f"g{i}": finite_numbers(random, shape) for i, shape in enumerate(shapes)}
    for number in FINITE:
        assert session.run(None, {name: np.full_like(array, number) for name, array in feeds.items()})[0]
    assert session.run(None, feeds)[0]
    for array in feeds.values():
        for place in np.ndindex(array.shape):
            kept = array[place]
            for number in BAD:
                array[place] = number
                assert not session.run(None, feeds)[0], (place, number)
            array[place] = kept
    assert session.run(None, feeds)[0]


def test_small_rows_are_rows(small_rows: None) -> None:
    """The test above has products of both kinds, sums of rows, and gradients without a width."""
    found = [operators(check_of(random_shapes(np.random.default_rng(count), count))) for count in range(1, 21)]
    assert all(each["MatMul"] for each in found)
    assert sum(each["ReduceSum"] > each["Mul"] for each in found) > 10
    assert sum(each["Mul"] > 0 for each in found) > 2
    assert sum(each["Sum"] > 2 for each in found) > 5


# With a width for itself, for both, a dot product, and none: 12289 is prime, as 65537 is.
LARGE = ([64, 128, 3], [8192], [3, 4096], [12289], [65537], [2, 3, 65537])


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_elements_of_large_gradients_are_seen(shape: list[int]) -> None:
    random = np.random.default_rng(math.prod(shape))
    session = make_session(ir.to_proto(check_of([shape, [32, 512]])))
    feeds = {"g0": finite_numbers(random, shape), "g1": finite_numbers(random, [32, 512])}
    assert session.run(None, feeds)[0]
    flat = feeds["g0"].reshape(-1)
    places = {0, 1, flat.size - 2, flat.size - 1, *random.integers(0, flat.size, 60).tolist()}
    for place in places:
        kept = flat[place]
        for number in BAD:
            flat[place] = number
            assert not session.run(None, feeds)[0], (place, number)
        flat[place] = kept


@pytest.mark.cuda
@pytest.mark.parametrize("tf32", ["0", "1"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_elements_of_large_gradients_are_seen_by_a_gpu(shape: list[int], tf32: str) -> None:
    """With TF32, numbers next to the largest ones are left out: they may be rounded to infinity."""
    random = np.random.default_rng(1)
    options = ort.SessionOptions()
    providers = [("CUDAExecutionProvider", {"device_id": "0", "use_tf32": tf32})]
    model = ir.to_proto(check_of([shape, [32, 512]]))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
    feeds = {"g0": finite_numbers(random, shape), "g1": finite_numbers(random, [32, 512])}
    if tf32 == "1":
        feeds = {name: np.clip(array, -3.4e38, 3.4e38) for name, array in feeds.items()}
    assert session.run(None, feeds)[0]
    flat = feeds["g0"].reshape(-1)
    for place in {0, 1, flat.size - 2, flat.size - 1, *random.integers(0, flat.size, 60).tolist()}:
        kept = flat[place]
        for number in BAD:
            flat[place] = number
            assert not session.run(None, feeds)[0], (place, number)
        flat[place] = kept


def test_infinities_of_both_signs_do_not_cancel() -> None:
    session = make_session(ir.to_proto(check_of([[16, 512], [3], [5]])))
    feeds = {"g0": np.ones([16, 512], np.float32), "g1": np.ones(3, np.float32), "g2": np.ones(5, np.float32)}
    assert session.run(None, feeds)[0]
    feeds["g0"][3, 5], feeds["g0"][4, 5] = np.inf, -np.inf
    feeds["g1"][0], feeds["g2"][0] = np.inf, -np.inf
    assert not session.run(None, feeds)[0]


@pytest.mark.parametrize("dtype", ["FLOAT16", "DOUBLE"])
def test_gradients_of_other_dtypes(dtype: str) -> None:
    kind = ir.DataType[dtype]
    model = check_of([[32, 512], [7]], kind)
    assert operators(model)["MatMul"] == (0 if dtype == "DOUBLE" else 2)
    session = make_session(ir.to_proto(model))
    largest = np.finfo(kind.numpy()).max
    feeds = {"g0": np.full([32, 512], largest), "g1": np.full(7, -largest)}
    assert session.run(None, feeds)[0]
    for name, place in (("g0", (31, 511)), ("g1", 3)):
        for number in BAD:
            kept = feeds[name][place]
            feeds[name][place] = number
            assert not session.run(None, feeds)[0], (name, number)
            feeds[name][place] = kept


# --- widths -----------------------------------------------------------------------------------------------------------


def test_the_widest_of_the_widths_that_most_sizes_share() -> None:
    assert row_widths([2**20, 2**20, 2**14, 768 * 768]) == {2**20: 2048, 2**14: 2048, 768 * 768: 2048}
    assert row_widths([2**20, 2**20, 2**20, 3 * 7 * 11 * 13 * 17 * 19]) == {2**20: 2**14, 969969: 12597}


def test_small_sizes_and_leftovers_are_dot_products() -> None:
    assert row_widths([1, 10, 4096, 2**20, 12289]) == {1: 1, 10: 1, 4096: 1, 12289: 1, 2**20: 2**14}


def test_a_large_size_without_a_divisor_has_no_width() -> None:
    assert row_widths([65537, 2 * 65537, 8192]) == {8192: 1024}
    assert row_widths([2**31]) == {}  # rows of the largest width would be more zeros than a file is to hold
    assert row_widths([]) == {}


@pytest.mark.full
def test_a_width_divides_its_sizes() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        every = [int(n) for n in np.exp(random.uniform(0, 19, 12))] + [
            int(n) * 768 for n in random.integers(1, 9999, 9)
        ]
        found = row_widths(every)
        assert found.keys() <= {*every}
        assert all(size % width == 0 and size // width <= 2**16 for size, width in found.items())
        assert all(width == 1 or size // width >= 8 for size, width in found.items())


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def count_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[onnx.ModelProto], int]:
    """Counts the kernels of the check in the graph that ONNX Runtime makes of a model."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    launches = importlib.import_module("training_steps.launches").launches

    def count(model: onnx.ModelProto) -> int:
        make_session(model, optimized=tmp_path / "optimized.onnx")
        found = launches(onnx.load(tmp_path / "optimized.onnx"))
        assert isinstance(found, int)
        return found

    return count


def transformer(blocks: int, width: int = 768, ends: bool = True) -> list[list[int]]:
    block = [[width], [width], [width, 3 * width], [3 * width], [width, width], [width], [width], [width]]
    block += [[width, 4 * width], [4 * width], [4 * width, width], [width]]
    return blocks * block + ends * [[50257, width], [1024, width], [width], [width]]


def perceptron(count: int) -> list[list[int]]:
    return [[784, 2048], [2048], *((count - 5) // 2 * [[2048, 2048], [2048]]), [2048, 10], [10], [1]]


def convolutions(count: int) -> list[list[int]]:
    """Filters and the two vectors of a normalization, the first with 9408 weights; a last layer."""
    widths = [64, 64, 128, 256, 512]
    layers = [[shape, [shape[0]], [shape[0]]] for shape in ([w, w, 3, 3] for w in widths)] * (count // 15)
    return [[64, 3, 7, 7], [64], [64], *(shape for layer in layers for shape in layer), [1000, 512], [1000]]


SETS = {
    "13": perceptron(13),
    "148": transformer(12),
    "600": transformer(50, ends=False),
    "65": convolutions(60),
    "1": [[3, 4]],
    "1-in-rows": [[512, 512]],
    "2": [[512, 512], [512]],
    "9": 9 * [[7]],
}


@pytest.mark.full
def test_the_bound_holds_for_any_mixture() -> None:
    for count in range(1, 25):
        for rows in range(count + 1):
            found = operators(check_of([*rows * [[16, 512]], *(count - rows) * [[7]]]))
            kernels = found.total() - found["Reshape"]
            assert found["MatMul"] == count
            assert kernels <= count + math.ceil(count / 7) + 4


TEXT = (ROOT / "docs" / "reference" / "targets.md").read_text(encoding="utf-8")


def count_in_rows(shapes: Sequence[Sequence[int]]) -> int:
    elements = [math.prod(shape) for shape in shapes]
    widths = row_widths(elements)
    return sum(widths[size] > 1 for size in elements)


@pytest.mark.parametrize("name", SETS)
def test_kernels_of_a_check(name: str, count_kernels: Callable[[onnx.ModelProto], int]) -> None:
    """Without control flow, and without a shape that is computed."""
    shapes, count = SETS[name], len(SETS[name])
    assert str(count) == name.partition("-")[0]
    model = check_of(shapes)
    assert operators(model).keys() <= {"IsNaN", "MatMul", "Not", "ReduceSum", "Reshape", "Sum"}
    in_rows = count_in_rows(shapes)
    found = count_kernels(ir.to_proto(model))
    rows = math.ceil((in_rows - 1) / 7) + 1 if in_rows else 0
    scalars = count - in_rows + (in_rows > 0)
    assert found == count + rows + math.ceil((scalars - 1) / 7) + 2
    assert found <= count + math.ceil(count / 7) + 4
    written = count_kernels(ir.to_proto(check_of(shapes, target="onnx")))
    assert written == (3 * count + 3 if count > 8 else 2 * count + 3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rows", "kernels", "before"), [("13", 6, 18, 42), ("148", 50, 172, 447), ("600", 200, 690, 1803)]
)
def test_numbers_of_the_docs(
    name: str, rows: int, kernels: int, before: int, count_kernels: Callable[[onnx.ModelProto], int]
) -> None:
    assert count_in_rows(SETS[name]) == rows
    assert count_kernels(ir.to_proto(check_of(SETS[name]))) == kernels
    assert count_kernels(ir.to_proto(check_of(SETS[name], target="onnx"))) == before
    [line] = [line for line in TEXT.splitlines() if line.startswith(f"| {name} | {kernels} | {before:,} | ")]
    assert line.endswith(f", r = {rows} |")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_kernels_of_a_step(name: str, count_kernels: Callable[[onnx.ModelProto], int]) -> None:
    """The check within the bound, one Where for each state or accumulator, and no branch."""
    result = gs.scale(load_example(name).model(), target="ort-cuda")
    graph = ir.from_proto(result.model).graph
    marked = (node for node in graph if PASS_KEY in node.metadata_props)
    # The standard forms of training operators are the step's own computation.
    inserted = [node for node in marked if not LowerTrainingOps.inserted(node)]
    assert not {node.op_type for node in inserted} & {"If", "Loop", "Scan", "Shape", "Size"}
    check = Counter(node.op_type for node in inserted if CheckFinite.inserted(node))
    written, count = check["Mul"], check["Mul"] + check["MatMul"]
    assert count >= 1
    # A product that is written is one kernel more, and so is each cast of a small type.
    assert count_kernels(result.model) <= count + written + check["Cast"] + math.ceil(count / 7) + 4
    guards = sum(GuardUpdates.inserted(node) and node.op_type == "Where" for node in inserted)
    carried = sum(pair.how != "state of the loss scale" for pair in result.report.state)
    added_up = sum(node.op_type.startswith("InPlaceAccumulator") and node not in inserted for node in graph)
    assert guards == carried + added_up


@pytest.mark.parametrize("name", SETS)
def test_the_check_is_proved_to_see_each_gradient(name: str) -> None:
    graph = check_of(SETS[name]).graph
    assert find_tested_values(graph.outputs[0]) >= {*graph.inputs}


def test_shapes_that_are_not_known_keep_the_written_products(count_kernels: Callable[[onnx.ModelProto], int]) -> None:
    model = check_of([["n", 5], [3, 4], ["n"]])
    assert operators(model) == {"Mul": 2, "ReduceSum": 2, "Reshape": 1, "MatMul": 1, "Sum": 1, "IsNaN": 1, "Not": 1}
    assert count_kernels(ir.to_proto(model)) == 2 * 2 + 1 + 1 + 2


def test_gradients_without_elements() -> None:
    session = make_session(ir.to_proto(check_of([[0, 5], [3]])))
    assert session.run(None, {"g0": np.ones([0, 5], np.float32), "g1": np.ones(3, np.float32)})[0]
    assert not session.run(None, {"g0": np.ones([0, 5], np.float32), "g1": np.full(3, np.nan, np.float32)})[0]


def test_an_operator_without_known_kernels(count_kernels: Any) -> None:
    launches = importlib.import_module("training_steps.launches").launches
    assert launches(step()) is None
    scaled = ir.to_proto(check_of([[3]]))
    scaled.graph.node[0].op_type = "Erf"
    with pytest.raises(LookupError, match="kernels of Erf"):
        launches(scaled)
