"""The second half on each replica as a whole: reduced gradients in, the same next state everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.replicas.buckets import lay_out
from graphscale.replicas.collectives import Replicas
from graphscale.replicas.first_half import Arena, Held
from graphscale.replicas.reduction import Reduction
from graphscale.replicas.splitting import Halves
from graphscale.replicas.whole import first_state
from graphscale.session.carried import check_state
from graphscale.session.result import StepResult
from graphscale.session.session import Session

__all__ = ["REDUCING", "SHARING", "WholeUpdate"]

Arrays = dict[str, np.ndarray[Any, Any]]

REDUCING = "the reduction of gradients"
SHARING = "the broadcast of the state"


class WholeUpdate:
    """Every replica updates all state, from the mean of all gradients.

    Args:
        replicas: the processes.
        halves: the step.
        nbytes: what a message holds at most.
        providers, options: as for `Session`.
        state: first values, on rank 0.
    """

    def __init__(
        self,
        replicas: Replicas,
        halves: Halves,
        nbytes: int,
        providers: Sequence[Any] | None,
        options: Any,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._replicas = replicas
        buckets = lay_out(halves.groups, nbytes)
        self.arena = Arena(halves, buckets)
        memory = self.arena.buckets
        self.reduction = Reduction(replicas, buckets, lambda i: replicas.sum_in_place(memory[i], REDUCING), memory)
        self.session = Session(halves.update, providers, options, first_state(halves, state, replicas.is_first))
        self.inputs, self.output_names = self.session.inputs, self.session.output_names
        self.specs = self.session._carried.specs

    @property
    def held(self) -> Held:
        """The buffers of the session themselves."""
        return self.session._carried

    def apply(self, values: Mapping[str, Any], fetch: Sequence[str]) -> StepResult:
        """Run the second half."""
        return self.session.step({**values, **self.arena.gradients}, fetch=fetch)

    def initial(self) -> Arrays:
        """Return the first state."""
        return self.session.state_dict()

    def read(self) -> Arrays:
        """Return all state."""
        return self.session.state_dict()

    def check(self, state: Mapping[str, Any], source: str) -> Arrays:
        """Return all state as arrays that fit.

        Raises:
            SessionError: one is missing, unknown, or does not fit.
        """
        return check_state(self.specs, state, source)

    def write(self, state: Arrays) -> None:
        """Give the state of rank 0 to all."""
        if not self._replicas.is_first:
            state = self.session.state_dict()
        for name in sorted(state) if self._replicas.size > 1 else ():
            self._replicas.broadcast(state[name], SHARING)
        self.session.load_state_dict(state)
