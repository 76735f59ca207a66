"""Shared parts of the tests: the training graphs of models/, runs on ONNX Runtime, and skips of tests that cannot run.

A graph of models/ comes with a sample value for every input, with what its framework computed from it
(`expected`), and with what its in-place buffers held afterwards (`after`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import graphscale as gs
from tests.tiers import cases_beside_the_cover, cases_of_other_shares, mark_tiers, read_share, select_named_tests

Arrays = dict[str, np.ndarray]
Level = ort.GraphOptimizationLevel

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
MODEL_NAMES = tuple(sorted(path.relative_to(MODELS).with_suffix("").as_posix() for path in MODELS.glob("*/*.onnx")))
OPTIMIZATION_LEVELS = (
    Level.ORT_DISABLE_ALL,
    Level.ORT_ENABLE_BASIC,
    Level.ORT_ENABLE_EXTENDED,
    Level.ORT_ENABLE_ALL,
)

# Targets that a CPU runs: with explicit state, and with state in place.
TARGETS = ["onnx", pytest.param("ort-training", marks=pytest.mark.training)]

# The training build alone has this package; importing it would need torch, which the runtime itself does not.
HAS_TRAINING = importlib.util.find_spec("onnxruntime.training") is not None
NEEDS_TRAINING = f"needs onnxruntime-training; installed is stock onnxruntime {ort.__version__}"
NEEDS_CUDA = "needs CUDAExecutionProvider to run, with an NVIDIA GPU"


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A run of a dynamic loss scale, step by step.

    Attributes:
        config: the arguments of `DynamicLossScale`.
        steps: T for a step with finite gradients, F for one without.
        scales: the loss scale after each step.
        good_steps: the count of good steps after each step.
    """

    config: dict[str, Any]
    steps: str
    scales: tuple[float, ...]
    good_steps: tuple[int, ...]

    @property
    def name(self) -> str:
        """For test names."""
        return f"{self.steps}-from-{self.config['initial_loss_scale']:g}-by-{self.config['multiplier']:g}"

    def __iter__(self) -> Iterator[tuple[bool, float, int]]:
        for step, scale, good in zip(self.steps, self.scales, self.good_steps, strict=True):
            yield step == "T", scale, good


def _sequence(steps: str, scales: str, good_steps: str, initial: float = 1, period: int = 2, m: float = 2) -> Sequence:
    config = {"initial_loss_scale": initial, "increment_period": period, "multiplier": m}
    values = {"S": FLOAT32_MAX / 4, "2S": FLOAT32_MAX / 2, "max": FLOAT32_MAX}
    numbers = tuple(values[text] if text in values else float(text) for text in scales.split())
    return Sequence(config, steps, numbers, tuple(int(digit) for digit in good_steps))


FLOAT32_MAX = float(np.finfo(np.float32).max)
# The semantics, pinned: what TensorFlow's DynamicLossScale does.
SEQUENCES = (
    _sequence("TTTTTT", "1 2 2 4 4 8", "101010"),
    _sequence("TTTTTT", "S 2S 2S max max max", "101010", initial=FLOAT32_MAX / 4),
    _sequence("FFFFFF", "512 256 128 64 32 16", "000000", initial=1024),
    _sequence("FFFFFF", "8 4 2 1 1 1", "000000", initial=16),
    _sequence("TTTFT", "1 2 2 1 1", "10101"),
    _sequence("TTTFTT", "2 4 8 4 8 16", "000000", period=1),
    _sequence("TFTFTFTFT", "2 1 2 1 2 1 2 1 2", "000000000", period=1),
    _sequence("TFTFTFT", "32 16 16 8 8 4 4", "1010101", initial=32),
    _sequence("TTFTT", "4 12 4 4 12", "10010", initial=4, m=3),
    _sequence("FTTTFTFTTTF", "2 2 4 4 2 2 1 1 2 2 1", "01010101010", initial=4),
)
each_sequence = pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence.name)


@dataclasses.dataclass(frozen=True)
class Example:
    """A training graph of models/.

    Attributes:
        name: its folder and file name, without suffix.
        feeds: a sample value for every input.
        expected: every output, as the framework that exported the graph computed it.
        after: the in-place buffers after one run.
        lowered: the graph in standard operators, where the exported one has others.
    """

    name: str
    feeds: Arrays
    expected: Arrays
    after: Arrays
    lowered: onnx.ModelProto | None = None

    @property
    def path(self) -> Path:
        """The exported graph."""
        assert self.lowered is None
        return MODELS / f"{self.name}.onnx"

    def model(self) -> onnx.ModelProto:
        """The graph, loaded afresh."""
        return onnx.load(self.path) if self.lowered is None else copy.deepcopy(self.lowered)

    def as_for(self, target: str) -> Example:
        """Return the example as a target computes it: those of stock ONNX Runtime have no training operators."""
        return self if target.startswith("ort-training") or not self.name.startswith("ort/") else self.standard

    @functools.cached_property
    def standard(self) -> Example:
        """The example in standard operators, without writes in place."""
        expected = {**self.expected, **{f"{name}.next": value for name, value in self.after.items()}}
        return Example(self.name, self.feeds, expected, {}, gs.lower_training_ops(self.model()).model)


@functools.cache
def load_example(name: str) -> Example:
    """Read the sample values of a graph of models/, such as `pytorch/mlp_momentum`."""
    stored = np.load(MODELS / f"{name}.npz")
    groups: dict[str, Arrays] = {"": {}, "expected": {}, "after": {}}
    for key in stored.files:
        group, _, rest = key.partition("/")
        groups[group if rest else ""][rest or key] = stored[key]
    return Example(name, groups[""], groups["expected"], groups["after"])


def make_session(
    model: onnx.ModelProto | Path,
    level: Level | None = None,
    providers: tuple[str, ...] = ("CPUExecutionProvider",),
    optimized: Path | None = None,
) -> ort.InferenceSession:
    """Load a model into ONNX Runtime, which logs errors only; skip the test where this build has no such operators.

    Args:
        model: the model, or its path.
        level: the graph optimization level; None for ONNX Runtime's default, all optimizations.
        providers: the execution providers.
        optimized: a file for the graph that ONNX Runtime executes.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if level is not None:
        options.graph_optimization_level = level
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    try:
        return ort.InferenceSession(source, options, providers=list(providers))
    except Exception as error:  # ORT's exceptions share no public base class
        missing = "com.microsoft" in str(error) and "is not a registered function" in str(error)
        if missing and not HAS_TRAINING:
            pytest.skip(f"the graph has com.microsoft gradient operators: {NEEDS_TRAINING}")
        raise


def run_session(session: ort.InferenceSession, feeds: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Run a session once on copies of the feeds.

    Returns:
        the outputs, and the feeds as the run left them: in-place operators write into the memory that is fed.
    """
    wanted = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
    copies = {name: np.array(value) for name, value in feeds.items() if name in wanted}
    names = [output.name for output in session.get_outputs()]
    # Outputs may share memory with what they were computed from in place.
    values = [np.array(value) for value in session.run(names, copies)]
    return dict(zip(names, values, strict=True)), copies


def run_once(
    model: onnx.ModelProto | Path, feeds: Mapping[str, Any], level: Level | None = None
) -> tuple[Arrays, Arrays]:
    """Run a model once in a fresh session; return what `run_session` does."""
    return run_session(make_session(model, level), feeds)


def initial_values(model: onnx.ModelProto) -> Arrays:
    """The initializers of a model."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def with_initializers(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A copy of a model whose bare inputs of these names have these initial values, and need not be fed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    inputs = {value.name for value in copy.graph.input}
    for name, array in values.items():
        assert name in inputs
        copy.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return copy


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Two arrays have the same dtype, shape and bits; NaNs count by their bits too."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    if actual.tobytes() != expected.tobytes():
        raise AssertionError(f"{name}: {np.count_nonzero(actual != expected)} of {actual.size} elements differ")


def assert_all_same_bits(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Every array of `expected` is in `actual`, bit for bit."""
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


@functools.cache
def has_cuda() -> bool:
    """Return whether the CUDA provider not only is in this build but starts: there may be no GPU."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return False
    text = '<ir_version: 8, opset_import: ["" : 17]> probe (float[1] x) => (float[1] y) { y = Neg(x) }'
    model = onnx.parser.parse_model(text)
    ort.set_default_logger_severity(4)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
    ort.set_default_logger_severity(2)
    return "CUDAExecutionProvider" in session.get_providers()


def pytest_configure(config: pytest.Config) -> None:
    """Run the tests that are named, in whatever tier they are."""
    select_named_tests(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs another build of ONNX Runtime, or a GPU, with the reason; sort tests into tiers and shares."""
    for item in items:
        if not HAS_TRAINING and item.get_closest_marker("training"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_TRAINING))
        if item.get_closest_marker("cuda") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason=NEEDS_CUDA))
    if not any("::" in argument for argument in config.args):
        _leave_out(config, items, cases_beside_the_cover(items))
    mark_tiers(items)
    number, count = read_share()
    if count > 1:
        _leave_out(config, items, cases_of_other_shares(items, number, count))


def _leave_out(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=others)
    left_out = {id(item) for item in others}
    items[:] = [item for item in items if id(item) not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of each folder of tests, the longest first."""
    seconds: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder, of all processes together")
        for folder, time in seconds.most_common():
            terminalreporter.write_line(f"{time:8.1f} {folder}")


@pytest.fixture(params=MODEL_NAMES)
def example(request: pytest.FixtureRequest) -> Iterator[Example]:
    """Each graph of models/ in turn."""
    return load_example(request.param)
