"""Checkpoints of replicas: rank 0 reads and writes the files, and all take part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphscale.replicas.collectives import Replicas
from graphscale.training.arrays import Arrays
from graphscale.training.checkpoints import Checkpoints

__all__ = ["ReplicaCheckpoints"]


class ReplicaCheckpoints(Checkpoints):
    """The checkpoints of a run of several replicas. Only rank 0 needs to see the folder.

    Args:
        replicas: the processes.
        folder: where the checkpoints are.
        keep: how many of the newest stay.

    Raises:
        OutputError, TrainingError: as `Checkpoints`.
    """

    def __init__(self, replicas: Replicas, folder: str | os.PathLike[str], keep: int = 3) -> None:
        super().__init__(folder, keep)
        self._replicas = replicas

    def all(self) -> list[Path]:
        """Every checkpoint that rank 0 sees, the oldest first; on all replicas."""
        found = super().all() if self._replicas.is_first else []
        texts = self._replicas.exchange(json.dumps([str(path) for path in found]), "the list of checkpoints")
        return [Path(text) for text in json.loads(texts[0])]

    def newest_state(self) -> Arrays:
        """Return the arrays of the newest checkpoint on rank 0; none elsewhere, since rank 0 gives them to all."""
        return super().newest_state() if self._replicas.is_first else self._none()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder and keep other runs out of it, on rank 0."""
        if not self._replicas.is_first:
            yield
            return
        with super().opened():
            yield

    def _remove(self, path: Path) -> None:
        if self._replicas.is_first:
            super()._remove(path)

    def _none(self) -> Arrays:
        self.all()  # as rank 0 does
        return {}
