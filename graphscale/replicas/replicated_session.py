"""ReplicatedSession: one process per replica, gradients reduced by MPI, and one decision for all."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import GraphscaleError, ReplicaError, SessionError
from graphscale.files.tensor_files import Arrays
from graphscale.graph.damage import name_damage
from graphscale.pipeline import Model, ScaledModel
from graphscale.replicas.agreement import agree, decide, facts_of, means
from graphscale.replicas.buckets import BUCKET_BYTES, bucket_size
from graphscale.replicas.collectives import Replicas, Traffic, available_cores, describe_error
from graphscale.replicas.half_sessions import FirstHalf, ReplicaSetup, WholeUpdate
from graphscale.replicas.halves import REPLICAS_FINITE
from graphscale.replicas.sharded_update import ShardedUpdate
from graphscale.replicas.splitting import Halves, cut_halves, open_step
from graphscale.session.carried import check_state
from graphscale.session.interface import InputSpec, check_names, convert_feed, fingerprint
from graphscale.session.loading import make_quiet_options
from graphscale.session.result import StepResult
from graphscale.session.session import Access, Session
from graphscale.session.state_file import drop_state, read_state_file

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["ReplicatedSession"]


class ReplicatedSession(Session):
    """A training session of one replica among several, with the same step, on a share of the batch each.

    Each replica computes the gradients of its share of the batch. MPI_Allreduce computes their mean over all replicas,
    in the memory of the gradients. The step is applied only if the mean is finite on all replicas (MPI_LAND), so that
    the loss scale and all state stay the same everywhere. Scalar floating-point outputs that depend on the batch, and
    running statistics, are means over the replicas, too; other outputs are those of this replica's share.

    The methods are those of `Session`, on sessions of the two halves. Rank 0 writes the files, which belong to the
    whole step: any number of replicas, or a `Session`, can load them.

    All methods, but no properties, are collective: every replica calls them, in the same order. An error on one replica
    is raised on all, with its rank. A replica that dies or does not answer ends all, with one line on it; so does an
    exception that leaves a `with` block on one replica. Only one thread at a time may use a session, since the order of
    calls is common. A forked process cannot use it, and it cannot be copied or pickled.

    Args:
        step: a scaled step with its optimizer inside: a path, the result of `scale`, or a model.
        comm: an intra-communicator of mpi4py, such as `mpi4py.MPI.COMM_WORLD`: one replica for each of its processes.
        providers: execution providers, as for `Session`.
        session_options: options of ONNX Runtime, as for `Session`.
        state: `{input name: array}`: initial values of carried inputs, needed on rank 0 alone.
        bucket_bytes: the largest size of a message: bytes, or a text like "25MiB".
        stages: parts of the backward pass; the gradients of one are reduced while the next one runs.
        sharded: True if each replica keeps and updates only a share of the weights and moments (ZeRO, stage 1).
        replicas: number of replicas; None for one per process.
        timeout: seconds to wait for the others.

    Attributes:
        stamp: the scaling as the model's metadata record it.
        inputs: the inputs of a step, without the carried state: `{input name: InputSpec}`.
        output_names: the names of the outputs that a step can return.
        rank: the number of this replica, from 0.
        size: number of replicas.
        stopping: True if a replica called `ask_to_stop` before the last step; the same on all.

    Raises:
        ReplicaError: the replicas differ, or an argument is wrong on one of them.
        SplitError: the step cannot be cut at its gradients.
        ModelFileError, SessionError: as `Session`; with more than one replica they come as a ReplicaError.
    """

    @name_damage
    def __init__(
        self,
        step: Model | ScaledModel,
        comm: Any,
        *,
        providers: Sequence[Any] | None = None,
        session_options: ort.SessionOptions | None = None,
        state: Mapping[str, Any] | None = None,
        bucket_bytes: int | str = BUCKET_BYTES,
        stages: int = 1,
        sharded: bool = False,
        replicas: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._access = Access(waits=False)
        self._replicas = Replicas(comm, timeout)
        self._wants_stop = False
        self.stopping = False
        self.rank, self.size = self._replicas.rank, self._replicas.size
        what = "the start of all replicas"

        def prepare() -> tuple[ir.Model, Halves, dict[str, Any], int]:
            if providers is not None and any("CUDA" in str(provider) for provider in providers):
                raise SessionError("replicas run on the CPU provider: their gradients are reduced in its memory")
            nbytes = bucket_size(bucket_bytes)
            model, name = open_step(step.model if isinstance(step, ScaledModel) else step)
            found = cut_halves(model.clone(), name, stages)
            settings = {
                "the number of replicas": self.size if replicas is None else replicas,
                "the bucket size": nbytes,
                "the number of stages": stages,
                "sharding": bool(sharded),
            }
            return model, found, facts_of(model, found.stamp, settings), nbytes

        model, halves, facts, nbytes = self._replicas.agreed(prepare, what)
        agree(self._replicas, facts)
        if facts["the number of replicas"] != self.size:
            raise ReplicaError(
                f"replicas={replicas}, but {self.size} take part: start as many with mpiexec -n {replicas}"
            )
        self.stamp, self._cut = halves.stamp, halves.cut

        def open_sessions() -> tuple[WholeUpdate, FirstHalf]:
            options = self._shared_cores() if session_options is None else session_options
            setup = ReplicaSetup(self._replicas, halves, nbytes, providers, options, state)
            update = (ShardedUpdate if sharded and self.size > 1 else WholeUpdate)(setup)
            return update, FirstHalf(setup, update)

        self._update, self._first = self._replicas.agreed(open_sessions, what)
        self._stages = len(halves.stages)
        carried = self._update.specs
        names = [value.name or "" for value in model.graph.outputs]
        hidden = self.stamp.next_values(carried)
        self.output_names = tuple(name for name in names if name not in hidden)
        fed = {**self._update.inputs, **self._first.inputs}
        self.inputs: dict[str, InputSpec] = {
            name: fed[name] for value in model.graph.inputs if (name := value.name or "") in fed
        }
        self._common = [name for name in self.inputs if name in self._update.inputs]
        self._interface = fingerprint(self.inputs, names, carried)
        drop_state(model, self.stamp.carried)
        self._model = model
        self._session, self._fixed_scale = self._update.session, self._update.session._fixed_scale
        self._update.write(self._update.initial())

    @property
    def traffic(self) -> Traffic:
        """The traffic of this replica in collective operations so far."""
        return self._replicas.traffic

    def step(self, feeds: Mapping[str, Any], *, fetch: Sequence[str] | None = None) -> StepResult:
        """Run one training step, together with the other replicas.

        Args:
            feeds: `{input name: value}` of this replica's share of the batch, and of common inputs, such as a learning
                rate.
            fetch: the names of the outputs to return; None for all but the carried state.

        Returns:
            the outputs, `{output name: array}`, with attributes for the status of the step, such as `applied`.

        Raises:
            ReplicaError: a feed of one replica is missing, unknown, or does not fit, the step cannot run there, or an
                operand of the update differs between replicas. No state has changed.
        """
        with self._access:
            return self._step(feeds, fetch)

    def _step(self, feeds: Mapping[str, Any], fetch: Sequence[str] | None) -> StepResult:
        self._require_open()
        error: BaseException | None = None
        values: dict[str, Any] = {}
        wanted: tuple[str, ...] = ()
        common: dict[str, Any] = {}
        try:
            wanted = self.output_names if fetch is None else tuple(fetch)
            if not isinstance(feeds, Mapping):
                raise SessionError(f"feeds are a mapping of input names to values; got a {type(feeds).__name__}")
            check_names(self.inputs, feeds, self.output_names, wanted)
            values = self._first.check(feeds)
            common = {
                name: convert_feed(name, feeds[name], self.inputs[name]) for name in self._common if name in feeds
            }
        except BaseException as caught:
            error = caught
        for stage in range(self._stages):
            if error is None:
                try:
                    self._first.run(stage, values, wanted)
                except BaseException as caught:
                    error = caught
            # A replica with an error takes part nevertheless: the others are waiting for it.
            self._update.reduction.start(stage)
        finite = self._update.reduction.finish()
        if self.size > 1:
            same = {**common, "the loss scale": self.loss_scale, "the count of good steps": self.good_steps}
            finite, self.stopping = decide(self._replicas, error, finite, same, self._wants_stop)
        elif error is not None:
            raise error
        else:
            self.stopping = self._wants_stop
        return self._apply(values, common, finite, wanted)

    def state_dict(self) -> Arrays:
        """Return copies of all carried state; see `Session.state_dict`. It is the same on all replicas."""
        with self._access:
            self._require_open()
            return self._update.read()

    def load_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Replace all carried state on all replicas by the state on rank 0; other replicas' arguments are ignored.

        Raises:
            ReplicaError: a state is missing, unknown, or does not fit; then nothing has changed.
        """
        self._load(lambda: {} if state is None else state, "the state given")

    def load_state(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """Load all carried state on rank 0, from a file of `save_state`, also one of a `Session`.

        Returns:
            the extra texts, on all replicas.
        """
        extra: dict[str, str] = {}

        def read() -> Mapping[str, Any]:
            state, texts = read_state_file(path, self.stamp, self._interface)
            extra.update(texts)
            return state

        with self._access:
            self._load(read, os.fspath(path))
            return json.loads(self._replicas.exchange(json.dumps(extra), "reading the state")[0])  # type: ignore[no-any-return]

    def ask_to_stop(self) -> None:
        """Set `stopping` on all replicas after the next step, for a loop that all leave at once.

        The method is not collective: a single replica may call it, for example after a signal.
        """
        self._wants_stop = True

    def close(self) -> None:
        """Free the sessions, all buffers and the communicator; a replica still waiting for this one ends all."""
        self._close("has closed its session")

    def _close(self, reason: str) -> None:
        if not self._access.is_here:
            return  # the communicator belongs to another process
        with self._access:
            if self._session is not None:
                self._session = None
                self._update.reduction.close()
                self._update.session.close()
                self._replicas.close(reason)

    def _apply(
        self, values: dict[str, Any], common: dict[str, Any], finite: bool, wanted: tuple[str, ...]
    ) -> StepResult:
        """Run the second half on the reduced gradients."""
        averaged = means(self._replicas, {name: values[name].numpy() for name in self._cut.average})
        handed = {**{name: values.get(name) for name in self._cut.local}, **averaged}
        feeds = {**common, **{name: value for name, value in handed.items() if name in self._update.inputs}}
        if REPLICAS_FINITE in self._update.inputs:
            feeds[REPLICAS_FINITE] = np.asarray(finite)
        late = [name for name in wanted if name in self._update.output_names and name not in self._cut.outputs]
        try:
            result = self._update.apply(feeds, late)
        except BaseException as error:
            if self.size > 1:
                # The others have already applied the step.
                self._replicas.abort(f"the update failed: {describe_error(error)}")
            raise
        given = {**averaged, **result}
        outputs = {name: given[name] if name in given else values[name].numpy() for name in wanted}
        result.clear()
        result.update(outputs)
        return result

    def _load(self, read: Callable[[], Mapping[str, Any]], source: str) -> None:
        """Read and check state on rank 0, and send it to all."""

        def checked() -> Arrays:
            return check_state(self._update.specs, read(), source, self.stamp) if self._replicas.is_first else {}

        with self._access:
            self._require_open()
            found = self._replicas.agreed(checked, "reading the state")
            self._update.write(found)

    def _write_file(self, write: Callable[[], None], what: str) -> None:
        """Write a file on rank 0."""
        with self._access:
            self._replicas.agreed(lambda: write() if self._replicas.is_first else None, what)

    def _read(self, *names: str) -> list[Any]:
        return self._update.session._read(*names)

    def _shared_cores(self) -> ort.SessionOptions:
        """Return options that leave the other replicas on this machine their cores, if the launcher has bound none."""
        options = make_quiet_options()
        if (cores := available_cores()) == os.cpu_count():
            options.intra_op_num_threads = max(1, cores // self._replicas.neighbours)
        return options

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self.size > 1 and not isinstance(error, ReplicaError | SystemExit):
            # The others do not know of the error, and would wait for this replica.
            if isinstance(error, GraphscaleError):
                self._replicas.abort(describe_error(error), 2)
            traceback.print_exception(error)
            self._replicas.abort(describe_error(error))
        self._close("has closed its session" if error is None else f"has ended by {error!r}")
