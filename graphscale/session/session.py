"""The session: training steps in a row, with the state on the device."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import find_in_place_writes, find_late_failures
from graphscale.analysis.report import describe_policy
from graphscale.errors import ModelFileError, SessionError
from graphscale.files.tensor_files import Arrays
from graphscale.graph.damage import name_damage
from graphscale.lowering.lower_model import find_states_in_place, is_lowered, lower_step
from graphscale.lowering.lowering_pass import is_inserted
from graphscale.lowering.thresholds import PRODUCTION, Thresholds
from graphscale.pipeline import Model, ScaledModel
from graphscale.policy.names import COUNTERS, RESULTS, ScaledValue
from graphscale.process.stages import report_stage
from graphscale.process.summary import Row, Summary, few
from graphscale.session.carried import CarriedState, check_state, first_values, read_values
from graphscale.session.interface import InputSpec, fingerprint, read_specs
from graphscale.session.loading import choose_device, create, make_quiet_options, maps_files, open_model
from graphscale.session.result import GradientRange, StepResult
from graphscale.session.state_file import copy_without_state, export_step, read_state_file, write_state_file
from graphscale.session.step_plan import StepError, StepPlan, allocate_numbers
from graphscale.step.scaled_step import read

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["Access", "Session"]

_PLANS = 16  # plans for different feeds and outputs, kept ready


class Access:
    """A context for one thread at a time; the others wait.

    A forked process is refused: it would train a copy of its own, without the threads of ONNX Runtime, and wait forever
    for a lock that a thread held.

    Args:
        waits: False to refuse a thread instead of letting it wait.

    Raises:
        SessionError: this is another process; another thread is inside, and `waits` is False.
    """

    def __init__(self, waits: bool = True) -> None:
        self._lock, self._waits, self._process = threading.RLock(), waits, os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the context."""
        return os.getpid() == self._process

    def __enter__(self) -> Self:
        if not self.is_here:
            raise SessionError(
                f"the session was made in the process {self._process}, and a fork of it cannot use it; make a session "
                "here, and give it the state with state_dict and load_state_dict, or save_state and load_state"
            )
        if not self._lock.acquire(blocking=self._waits):
            raise SessionError(
                "another thread is using the session, whose calls must come in the same order on all replicas; call it "
                "from one thread"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class Session(Summary):
    """A training session of ONNX Runtime on a scaled step.

    Carried state (weights, moments, counters, the loss scale) stays on the device from step to step. A state that the
    target carries through outputs has one buffer if all readers run before the write, else two that take turns; the
    session of ONNX Runtime holds a state that the target writes in place.

    A step that fails leaves the state unchanged. Only where an operator that can fail runs after state is written in
    place, the state may be partly that of the failed step: then the session goes on only after a state is loaded.

    A session can be used in a `with` statement; `close` frees its memory. Several threads may use it; each waits for
    the others. A forked process cannot use it, and it cannot be copied or pickled.

    Args:
        model: a path to a scaled model, a `ScaledModel`, an onnx_ir model or a ModelProto.
        providers: execution providers, as for `onnxruntime.InferenceSession`; None for the CPU. Each must start.
        session_options: options of ONNX Runtime; None for the defaults, with its warnings silenced.
        state: `{input name: array}`: initial values of carried inputs. Those without an initializer need one.
        lowering: for experts: the sizes above which rewrites of the step for a CPU pay; None for no rewrite. The
            results are the same.

    Attributes:
        stamp: the metadata of the scaling.
        metadata: all metadata of the model.
        inputs: the inputs of a step without the carried state, `{input name: InputSpec}`.
        output_names: the outputs that a step can return.

    Raises:
        ModelFileError: the model carries no loss scale.
        SessionError: the state is incomplete, a provider is missing, or ONNX Runtime cannot load the model.
    """

    @name_damage
    def __init__(
        self,
        model: Model | ScaledModel,
        providers: Sequence[Any] | None = None,
        session_options: ort.SessionOptions | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        lowering: Thresholds | None = PRODUCTION,
    ) -> None:
        if isinstance(providers, str):
            providers = [providers]
        if not isinstance(providers, Sequence | None):
            raise SessionError(f"providers are a list of names, or of (name, options); got {providers!r}")
        self._access = Access()
        source, path = open_model(model)
        report_stage("making a session of ONNX Runtime")
        name = "the model" if path is None else path
        step = read(source, name)
        self.stamp, initializers = step.stamp, source.graph.initializers
        carried = {each.input.name or "": each for each in step.carried}
        if lost := self.stamp.carried - carried.keys():
            raise ModelFileError(f"{name} has damaged graphscale metadata: the graph does not carry {min(lost)!r}")
        outputs = {name: each.next.name or "" for name, each in carried.items() if not each.in_place}
        specs = {name: InputSpec.of(each.input) for name, each in carried.items()}
        first = first_values(specs, initializers, state or {}, self.stamp)
        device = choose_device(providers)
        in_place = [name for name in first if name not in outputs]
        # A session accepts no buffer of a GPU as an initializer; fed buffers there are written in place, too.
        on_gpu = device.name != "cpu"
        fed = [name for name in in_place if on_gpu or name not in initializers]
        is_mapped = path is not None and maps_files(source, outputs)  # ONNX Runtime opens the file itself
        work = source if is_mapped else source.clone()
        if not is_mapped and not is_lowered(source):
            lower_step(work, "cpu" if lowering is not None and not on_gpu else "cuda", lowering or PRODUCTION)
        self._carried = CarriedState(device, first, outputs, find_states_in_place(work), fed)
        held = {name: self._carried.buffer(name) for name in in_place if name not in fed}
        writes = list(find_in_place_writes(work.graph))
        self._may_tear = bool(find_late_failures(work.graph, writes, read(work).guard, is_inserted))
        self._torn = False
        options = make_quiet_options() if session_options is None else session_options
        self._session: Any = create(work, path, outputs, held, providers, options)
        if hasattr(self._session, "_model_bytes"):
            self._session._model_bytes = b""  # the whole model, kept for a fallback to other providers
        self._model: ir.Model | None = copy_without_state(source, first)
        fixed = initializers.get(self.stamp.names[ScaledValue.LOSS_SCALE])
        self.metadata = dict(source.metadata_props)
        self._fixed_scale = None if fixed is None or fixed.name in first else float(read_values(fixed))
        fed_specs = read_specs(self._session.get_inputs(), self._session.get_overridable_initializers())
        self.inputs = {name: spec for name, spec in fed_specs.items() if name not in first}
        hidden = self.stamp.next_values(first)
        names = [output.name for output in self._session.get_outputs()]
        self.output_names = tuple(name for name in names if name not in hidden)
        self._interface = fingerprint(self.inputs, names, self._carried.specs)
        self._status = {role.value: self.stamp.names[role] for role in RESULTS if role in self.stamp.names}
        self._accepts = self.stamp.policy.get("config", {}).get("on_stuck") == "accept"
        numbers = {} if on_gpu else allocate_numbers(self._session, self._status.values())
        parts = (self._session, self._carried, self.inputs, self.output_names, self._status, numbers)
        self._plan: Any = functools.lru_cache(_PLANS)(functools.partial(StepPlan, *parts))

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        # The state stays on its device: nothing here waits for a step, or copies.
        carried = self._carried.specs
        axes = {name: [axis for axis in spec.shape if isinstance(axis, int)] for name, spec in carried.items()}
        size = sum(spec.dtype.itemsize * math.prod(axes[name]) for name, spec in carried.items())
        inputs = [f"{name} {spec}" for name, spec in self.inputs.items()]
        return "closed" if self._session is None else f"open, state on {self._carried.device}", [
            ("loss scale", describe_policy(self.stamp.policy)),
            ("inputs", few(inputs)),
            ("outputs", few(self.output_names)),
            ("carried state", f"{len(carried)} arrays, {size:,} bytes: {few(list(carried))}"),
        ]

    @property
    def loss_scale(self) -> float:
        """The loss scale that the next step will use.

        Raises:
            SessionError: the loss scale is fed to the model; the session is closed.
        """
        if self._fixed_scale is None:
            return float(self._read(self.stamp.names[ScaledValue.LOSS_SCALE])[0])
        self._require_open()
        return self._fixed_scale

    @property
    def good_steps(self) -> int:
        """Good steps in a row since the loss scale changed last; 0 for a fixed loss scale."""
        name = self.stamp.names.get(ScaledValue.GOOD_STEPS)
        return 0 if name is None else int(self._read(name)[0])

    @property
    def counters(self) -> dict[str, int]:
        """Telemetry: `steps`, `skipped_steps`, `consecutive_skips`, and `last_skip_step`, a step's number from 1 or 0.

        Empty where the step was scaled without telemetry.
        """
        names = {role.value: self.stamp.names[role] for role in COUNTERS if role in self.stamp.names}
        return dict(zip(names, map(int, self._read(*names.values())), strict=True)) if names else {}

    @property
    def ranges(self) -> dict[str, GradientRange]:
        """Telemetry: the last measured ranges of the gradients, by name.

        Empty before the first step, and where the step was scaled without ranges.
        """
        names = self.stamp.names
        if ScaledValue.RANGES not in names:
            return {}
        steps, rows = self._read(names[ScaledValue.STEPS], names[ScaledValue.RANGES])
        # The last column holds all gradients together.
        columns = zip(self.stamp.telemetry.get("gradients", ()), *rows.tolist(), strict=False)
        return {name: GradientRange(*column) for name, *column in columns} if steps else {}

    def step(self, feeds: Mapping[str, Any], *, fetch: Sequence[str] | None = None) -> StepResult:
        """Run one training step.

        Args:
            feeds: `{input name: value}` of the batch, and of all other inputs that are not carried: numpy arrays,
                OrtValues, or tensors of other libraries, shared by DLPack without a copy where possible. Python numbers
                get the dtype of their input.
            fetch: the names of the outputs to return; None for all but the carried state.

        Returns:
            the outputs, `{output name: array}`, with attributes for the status of the step, such as `applied`.

        Raises:
            SessionError: a feed is missing, unknown, or does not fit; an output is unknown; the session is closed.
        """
        with self._access:
            self._require_state()
            if type(feeds) is not dict and not isinstance(feeds, Mapping):
                raise SessionError(f"feeds are a mapping of input names to values; got a {type(feeds).__name__}")
            plan = self._plan(tuple(feeds), self.output_names if fetch is None else _check_fetch(fetch))
            arrays, status = self._run(plan, feeds)
        return StepResult(arrays, status, self.stamp.telemetry, self._accepts)

    def _run(self, plan: StepPlan, feeds: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
        before = self._carried.buffers
        try:
            results = plan.run(feeds)
            self._carried.turn()
            return results
        except StepError as error:
            self._torn = self._may_tear
            if self._torn:
                raise SessionError(f"{error}; state may have been written before: load a state to go on") from error
            raise
        except BaseException:
            # A Ctrl-C is raised as soon as the run is over: the step counts.
            if self._carried.buffers is before and plan.has_run():
                self._carried.turn()
            raise

    def state_dict(self) -> Arrays:
        """Return copies of all carried state: `{name: array}`, weights, moments, counts and the loss scale."""
        with self._access:
            self._require_state()
            return self._carried.read()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all carried state.

        Args:
            state: the result of `state_dict` of a session on the same graph.

        Raises:
            SessionError: a state is missing, unknown, or does not fit; then nothing has changed.
        """
        self._write(state, "the state given")

    def save_state(self, path: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> None:
        """Write all carried state atomically to a safetensors file.

        Args:
            path: the file; an existing one is replaced only by a complete one.
            extra: texts to store in the file, which `load_state` returns.

        Raises:
            OutputError: the file cannot be written; an existing one is unchanged.
            SessionError: `extra` holds other values than texts; or the name ends in .npz, .npy or .onnx.
        """
        state = self.state_dict()
        self._write_file(lambda: write_state_file(path, state, self.stamp, self._interface, extra), "writing the state")

    def load_state(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """Read all carried state from a file of `save_state`; training then continues bit for bit.

        Returns:
            the extra texts.

        Raises:
            SessionError: the file is missing, truncated, or of another graph or policy; then nothing has changed.
        """
        self._require_open()
        state, extra = read_state_file(path, self.stamp, self._interface)
        self._write(state, os.fspath(path))
        return extra

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model with the present state: a session on that file continues from here.

        Raises:
            OutputError: the file cannot be written.
        """
        model, state = self._model, self.state_dict()
        assert model is not None
        self._write_file(lambda: export_step(model, state, path), "writing the step")

    def close(self) -> None:
        """Free the session of ONNX Runtime and all buffers. A closed session cannot be used."""
        with self._access if self._access.is_here else nullcontext():
            self._session = self._model = self._plan = None
            self._carried.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            f"a {type(self).__name__} cannot be copied or pickled: ONNX Runtime holds its state; make another one of "
            "the same step, and give it the state with state_dict and load_state_dict, or save_state and load_state"
        )

    def _write_file(self, write: Callable[[], None], what: str) -> None:
        write()

    def _write(self, state: Mapping[str, Any], source: str) -> None:
        with self._access:
            self._require_open()
            arrays = check_state(self._carried.specs, state, source, self.stamp)
            self._torn = True  # until all is written, even if interrupted
            self._carried.write(arrays)
            self._torn = False

    def _require_open(self) -> None:
        if self._session is None:
            raise SessionError("the session is closed")

    def _require_state(self) -> None:
        self._require_open()
        if self._torn:
            raise SessionError("the state is partly that of a step that failed; load a state to go on")

    def _read(self, *names: str) -> list[Any]:
        """Return copies of small states, all of one moment."""
        with self._access:
            self._require_open()
            for name in names:
                if name not in self._carried.specs:
                    raise SessionError(
                        f"{name!r} is fed to this model, and is none of its states: another model carries it, such as "
                        "the second half of a split step"
                    )
            return [np.array(self._carried.buffer(name).numpy()) for name in names]


def _check_fetch(fetch: Any) -> tuple[str, ...]:
    """Return the outputs to fetch, names in any iterable but a text."""
    if isinstance(fetch, str):
        raise SessionError(f"fetch is a list of output names; pass [{fetch!r}]")
    if not isinstance(fetch, Iterable):
        raise SessionError(f"fetch is a list of output names; got {fetch!r}")
    wanted = tuple(fetch)
    if wrong := [name for name in wanted if not isinstance(name, str)]:
        raise SessionError(f"fetch is a list of output names; it holds {wrong[0]!r}")
    return wanted
