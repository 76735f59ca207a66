"""Equality of two scaled graphs: on ONNX Runtime, and for readers of their metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

import graphscale as gs
from benchmarks.edits.subjects import Subject
from graphscale.graph.stamp_reading import read_stamp

__all__ = ["Behaviour", "UnlikeError", "UnloadableError"]

Feeds = dict[str, np.ndarray]

_SCALES = [2.0**e for e in (-10, 0, 15, 60, 120)]
_MAGNITUDES = (1e-3, 1.0, 1e2, 1e4)


class UnlikeError(Exception):
    """The models differ; the message says where."""


class UnloadableError(UnlikeError):
    """ONNX Runtime refuses the edited model: it never runs, which is less harmful than a wrong run."""


class Behaviour:
    """The behaviour of a scaled graph, on feeds that are drawn once.

    Args:
        subject: the graph.
        seed: of the feeds.

    Attributes:
        loads: whether this build of ONNX Runtime has a kernel for every node.
        ran: on how many feeds it ran.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject = subject
        self._rng = np.random.default_rng([seed, 1])
        self._feeds = self._draw_feeds()
        self._results = _run(subject.scaled, self._feeds)
        self.loads = isinstance(self._results, dict)
        self.ran = 0 if not self.loads else sum(isinstance(r, list) for r in self._results["runs"])
        self._consumers = {name: _outcome(consumer, subject, subject.scaled) for name, consumer in _CONSUMERS.items()}

    def compare(self, model: onnx.ModelProto) -> None:
        """Compare an edited model with the subject's.

        Raises:
            UnlikeError: they differ.
        """
        if self.loads:
            results = _run(model, self._feeds)
            if isinstance(results, str):
                raise UnloadableError(results)
            _same(self._results, results, "ONNX Runtime")
        for name, consumer in _CONSUMERS.items():
            _same(self._consumers[name], _outcome(consumer, self.subject, model), name)

    def _draw_feeds(self) -> list[Feeds]:
        graph, rng = self.subject.scaled.graph, self._rng
        names = read_stamp({p.key: p.value for p in self.subject.scaled.metadata_props}, "it").names
        counters = {name for role, name in names.items() if role != "loss_scale"}
        base = dict(self.subject.sample)
        base |= {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        base = {value.name: np.array(base[value.name]) for value in graph.input}
        floats = [name for name, array in base.items() if array.dtype.kind == "f" and array.size > 0]
        state = [name for name in floats if name not in counters and name != names["loss_scale"]]
        drawn = [base]
        for magnitude in _MAGNITUDES:
            drawn.append(self._redrawn(base, state, magnitude, 1))
        drawn += [self._redrawn(base, state, 1.0, size) for size in (2, 3)]
        for number in (np.nan, np.inf, -np.inf, np.nan, np.inf, np.float32(3e38)):
            feeds = {name: np.array(array) for name, array in drawn[int(rng.integers(2))].items()}
            array = feeds[str(rng.choice(state))].reshape(-1)
            with np.errstate(over="ignore"):  # 3e38 is infinite in float16
                array[int(rng.integers(array.size))] = number
            drawn.append(feeds)
        period = self._period()
        for i, feeds in enumerate(drawn[1:]):
            if names["loss_scale"] in feeds:
                feeds[names["loss_scale"]] = np.asarray(_SCALES[i % len(_SCALES)], base[names["loss_scale"]].dtype)
            for name in sorted(counters & set(feeds)):
                chosen = rng.choice([0, 1, 2, period - 1, period, 3, -1])
                feeds[name] = np.asarray(chosen).astype(base[name].dtype)
        return drawn

    def _period(self) -> int:
        """The number of good steps before the scale grows."""
        metadata = {p.key: p.value for p in self.subject.scaled.metadata_props}
        return int(json.loads(metadata["graphscale.policy"])["config"].get("increment_period", 1))

    def _redrawn(self, base: Mapping[str, np.ndarray], state: list[str], magnitude: float, factor: int) -> Feeds:
        """Random numbers for all feeds, the symbolic axes some times as long."""
        drawn: Feeds = {}
        for value in self.subject.scaled.graph.input:
            array, dims = base[value.name], value.type.tensor_type.shape.dim
            sizes = [n * factor if dim.dim_param else n for n, dim in zip(array.shape, dims, strict=False)]
            if value.name in state:
                drawn[value.name] = (magnitude * self._rng.standard_normal(sizes)).astype(array.dtype)
                if array.min() >= 0:
                    drawn[value.name] = np.abs(drawn[value.name])  # second moments, probabilities, rates
            elif sizes:
                drawn[value.name] = self._rng.choice(array.reshape(-1), sizes) if array.size else array
            else:
                drawn[value.name] = array
        return drawn


def _run(model: onnx.ModelProto, feeds: list[Feeds]) -> Any:
    """The interface of a model for ONNX Runtime, its results on each feed, and those of three steps of its own."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT's exceptions share no public base class
        return f"does not load: {str(error)[:300]}"
    groups = (session.get_inputs(), session.get_overridable_initializers(), session.get_outputs())
    interface = [[(value.name, value.type, [str(n) for n in value.shape]) for value in group] for group in groups]
    given = {value.name for group in groups[:2] for value in group}
    needed = {value.name for value in groups[0]}
    runs = [_step(session, {name: np.array(a) for name, a in each.items() if name in given}) for each in feeds]
    # State that the session holds: what the runs before have left in it, too.
    runs += [_step(session, {name: np.array(a) for name, a in feeds[0].items() if name in needed}) for _ in range(3)]
    return {"interface": interface, "runs": runs}


def _step(session: ort.InferenceSession, feeds: Feeds) -> Any:
    """All outputs, and the feeds as the run leaves them, since operators in place write into them."""
    try:
        outputs = session.run(None, feeds)
    except Exception as error:
        return f"{type(error).__name__}"
    return _digest([*outputs, *(feeds[name] for name in sorted(feeds))])


def _digest(content: Any) -> Any:
    """Put a text in place of each array: equal for the same bits, and with the first numbers."""
    if isinstance(content, np.ndarray | np.generic):
        array = np.asarray(content)
        bits = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        return f"{array.dtype}{list(array.shape)} {array.reshape(-1)[:3].tolist()} {bits}"
    if isinstance(content, dict):
        return {key: _digest(value) for key, value in content.items()}
    return [_digest(value) for value in content] if isinstance(content, list | tuple) else content


def _session(subject: Subject, model: onnx.ModelProto) -> Any:
    """Two steps of `gs.Session`, and one whose batch is not finite."""
    stamp = read_stamp({p.key: p.value for p in subject.scaled.metadata_props}, "it")
    held = {t.name for t in subject.scaled.graph.initializer}
    state = {name: subject.sample[name] for name in stamp.carried if name in subject.sample and name not in held}
    with gs.Session(model, state=state) as session:
        # Copies: an accumulator that is an input is written in place, in the memory that is fed.
        batch = {name: np.array(subject.sample[name]) for name in session.inputs if name in subject.sample}
        bad = {name: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for name, a in batch.items()}
        told: list[Any] = [sorted(session.inputs.items(), key=str), session.output_names]
        for feeds in (batch, batch, bad):
            result = session.step(feeds)
            told += [result.all_finite, result.stuck, result.applied, result.cause, result.offender]
            told += [result.zero_fraction, session.loss_scale, session.good_steps, session.counters, dict(result)]
        return [*told, session.state_dict()]


def _split(_: Subject, model: onnx.ModelProto) -> Any:
    """The cut and the results of both halves, without the names of nodes and documentation."""
    step = gs.split(model)
    halves = [half for half in (*step.gradients, step.update) if isinstance(half, onnx.ModelProto)]
    return [step.report.to_dict(), *(_skeleton(half) for half in halves)]


def _skeleton(model: onnx.ModelProto) -> list[Any]:
    """The nodes by what they compute from what: names of values inside and the order of nodes are free."""
    graph, computed = model.graph, {value.name: value.name for value in model.graph.input}
    for tensor in graph.initializer:
        content = onnx.numpy_helper.to_array(tensor)
        computed.setdefault(tensor.name, _hash(str(content.dtype), str(content.shape), content.tobytes().hex()))
    nodes = []
    for node in graph.node:
        plain = [_undocumented(a).SerializeToString().hex() for a in node.attribute if not a.HasField("g")]
        key = _hash(node.domain, node.op_type, *sorted(plain), *(computed.get(name, name) for name in node.input))
        computed.update((name, f"{key}.{index}") for index, name in enumerate(node.output))
        nodes.append(key)
    ends = [[value.name, computed.get(value.name, "")] for value in graph.output]
    return [sorted(nodes), [value.name for value in graph.input], ends, len(graph.initializer)]


def _undocumented(attribute: onnx.AttributeProto) -> onnx.AttributeProto:
    bare = onnx.AttributeProto()
    bare.CopyFrom(attribute)
    for described in (bare, bare.t):
        described.ClearField("doc_string")
    bare.t.ClearField("name")
    if not attribute.HasField("t"):
        bare.ClearField("t")
    return bare


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _inspect(_: Subject, model: onnx.ModelProto) -> Any:
    """The report, without the words of its evidence, which are for people."""
    report = gs.inspect(model).to_dict()
    roles = [{**role, "evidence": "", "certain": ""} for role in report.pop("roles")]
    states = [{**state, "how": ""} for state in report.pop("state")]
    return [{**report, "warnings": [], "loss_found": ""}, roles, states]


def _strip(subject: Subject, model: onnx.ModelProto) -> Any:
    """The results of the stripped model; names inside of it may be others."""
    stripped = gs.strip(model)
    assert isinstance(stripped, onnx.ModelProto)
    return _run(stripped, [{name: np.array(array) for name, array in subject.sample.items()}])


def _lint(_: Subject, model: onnx.ModelProto) -> Any:
    return sorted(finding.code for finding in gs.lint(model).findings)


_CONSUMERS = {"gs.Session": _session, "gs.strip": _strip, "gs.lint": _lint, "gs.split": _split, "gs.inspect": _inspect}


def _outcome(consumer: Any, subject: Subject, model: onnx.ModelProto) -> Any:
    try:
        return _digest(consumer(subject, model))
    except gs.GraphscaleError as error:
        return f"refused: {type(error).__name__}"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"


def _same(expected: Any, got: Any, where: str) -> None:
    """Compare digests; raise `UnlikeError` where they differ."""
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            _same(one, other, f"{where}.{i}")
    elif isinstance(expected, dict) and isinstance(got, dict) and list(expected) == list(got):
        for key in expected:
            _same(expected[key], got[key], f"{where}.{key}")
    elif type(expected) is not type(got) or not (expected == got or repr(expected) == repr(got)):
        raise UnlikeError(f"{where}: {str(expected)[:150]} is {str(got)[:150]}")
