"""More than one machine: a scaled step in two halves, and sessions of replicas that reduce gradients in between."""

from graphscale.replicas.session import ReplicatedSession
from graphscale.replicas.split import SplitReport, SplitStep, split

__all__ = ["ReplicatedSession", "SplitReport", "SplitStep", "split"]
