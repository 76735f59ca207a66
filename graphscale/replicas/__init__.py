"""More than one machine: a scaled step in two halves, and sessions of replicas that reduce gradients in between."""

from graphscale.replicas.errors import ReplicaError, SplitError
from graphscale.replicas.session import ReplicatedSession
from graphscale.replicas.split import SplitReport, SplitStep, split

__all__ = ["ReplicaError", "ReplicatedSession", "SplitError", "SplitReport", "SplitStep", "split"]
