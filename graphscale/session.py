"""Running a scaled training step: the carried state goes from each step to the next by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from graphscale import io
from graphscale.errors import SessionError
from graphscale.metadata import read_stamp
from graphscale.pipeline import ScaledModel

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["Session"]

_QUIET = 3  # errors and worse: ORT warns on stderr for every initializer that is also an input

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


class Session:
    """A training session of ONNX Runtime on a scaled step.

    Args:
        model: a path to a scaled model, a `ScaledModel`, an onnx_ir model or a ModelProto.
        providers: execution providers, as for `onnxruntime.InferenceSession`; None for the CPU.
        session_options: options of ONNX Runtime; None for the defaults, with its warnings silenced.
        state: `{input name: array}`: initial values of carried inputs. Those without an initializer need one.

    Raises:
        ModelFileError: the model carries no loss scale.
        SessionError: the state is incomplete, or ONNX Runtime cannot load the model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ScaledModel | ir.Model | onnx.ModelProto,
        providers: Sequence[Any] | None = None,
        session_options: ort.SessionOptions | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        import onnxruntime as ort

        source, graph_model = _source(model)
        self._stamp = read_stamp(graph_model.metadata_props, "the model")
        if session_options is None:
            session_options = ort.SessionOptions()
            session_options.log_severity_level = _QUIET
        try:
            self._session = ort.InferenceSession(
                source, session_options, providers=list(providers or ["CPUExecutionProvider"])
            )
        except Exception as error:  # ORT's exceptions share no public base class
            raise SessionError(f"ONNX Runtime {ort.__version__} cannot load the model: {error}") from error
        self._dtypes = {
            value.name: np.dtype(_DTYPES[value.type]) for value in self._session.get_inputs() if value.type in _DTYPES
        }
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._initializers = graph_model.graph.initializers
        self._carried = dict(self._stamp.state)
        self._state = self._initial_state(state or {})
        self._last = self._scalars()

    @property
    def loss_scale(self) -> float:
        """The loss scale that the next step will use."""
        return float(self._last["loss_scale"])

    @property
    def good_steps(self) -> int:
        """Good steps in a row since the loss scale changed last; 0 for a fixed loss scale."""
        return int(self._last.get("good_steps", 0))

    def step(self, feeds: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Run one training step.

        Args:
            feeds: `{input name: array}` of the batch, and of whatever else is not carried.

        Returns:
            `{output name: array}` without the carried state; `all_finite` says whether the step was applied.

        Raises:
            SessionError: a feed is missing, unknown, or does not fit.
        """
        wrong = [name for name in feeds if name in self._carried]
        if wrong:
            raise SessionError(f"{wrong[0]!r} is carried from step to step by the session; do not feed it")
        try:
            values = self._session.run(self._outputs, {**self._arrays(feeds), **self._state})
        except Exception as error:  # ORT's exceptions share no public base class
            raise SessionError(f"the step could not run: {error}") from error
        results = dict(zip(self._outputs, values, strict=True))
        for input_name, output_name in self._carried.items():
            self._state[input_name] = results[output_name]
        for role in ("loss_scale", "good_steps"):
            following = f"{self._stamp.names.get(role)}.next"
            if following in results:
                self._last[role] = results[following]
        hidden = {
            *self._carried.values(),
            *(f"{self._stamp.names.get(r)}.next" for r in ("loss_scale", "good_steps")),
        }
        return {name: value for name, value in results.items() if name not in hidden}

    def _arrays(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Python numbers take the dtype of their input; arrays and scalars of numpy keep theirs."""
        found = {}
        for name, value in feeds.items():
            number = isinstance(value, bool | int | float)
            found[name] = np.asarray(value, dtype=self._dtypes.get(name)) if number else value
            if isinstance(value, np.generic):
                found[name] = np.asarray(value)
        return found

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the carried state as it stands: `{input name: array}`, weights and the loss scale among them.

        State that the target writes in place is not there: it lives in the session of ONNX Runtime.
        """
        return {
            name: np.asarray(self._state[name]) if name in self._state else self._initializer(name)
            for name in self._carried
        }

    def _initial_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: np.asarray(value) for name, value in state.items()}
        unknown = [name for name in given if name not in self._carried]
        if unknown:
            raise SessionError(f"{unknown[0]!r} is not carried by this model; carried are {', '.join(self._carried)}")
        needed = {value.name for value in self._session.get_inputs()}
        missing = [name for name in self._carried if name in needed and name not in given]
        if missing:
            raise SessionError(
                f"the carried inputs {', '.join(missing)} have no initializer; pass their first values as state"
            )
        return given

    def _initializer(self, name: str) -> np.ndarray[Any, Any]:
        tensor = self._initializers[name].const_value
        assert tensor is not None
        return tensor.numpy()

    def _scalars(self) -> dict[str, Any]:
        found = {}
        for role in ("loss_scale", "good_steps"):
            name = self._stamp.names.get(role, "")
            if name in self._state:
                found[role] = self._state[name]
            elif name in self._initializers:
                found[role] = self._initializer(name)
        return found


def _source(model: Any) -> tuple[str | bytes, ir.Model]:
    """What ORT shall load, and the same as an onnx_ir model."""
    if isinstance(model, ScaledModel):
        model = model.model
    if isinstance(model, ir.Model):
        return io.to_proto(model).SerializeToString(), model
    if isinstance(model, onnx.ModelProto):
        return model.SerializeToString(), io.from_proto(model)
    loaded = io.load(model)
    return os.fspath(model), loaded
