"""What can be wrong with a step that is to be split, or with replicas that are to train together."""

from __future__ import annotations

from graphscale.errors import GraphscaleError

__all__ = ["ReplicaError", "SplitError"]


class SplitError(GraphscaleError):
    """A step cannot be cut at its gradients, or not in the way that was asked for."""


class ReplicaError(GraphscaleError):
    """Replicas do not agree, one of them has failed or does not answer, or MPI is missing."""
