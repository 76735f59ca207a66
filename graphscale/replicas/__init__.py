"""Several machines: a scaled step in two halves, and sessions of replicas that reduce gradients in between."""

from graphscale.replicas.replicated_session import ReplicatedSession
from graphscale.replicas.splitting import SplitReport, SplitStep, split

__all__ = ["ReplicatedSession", "SplitReport", "SplitStep", "split"]
