"""Sessions that run a scaled training step, and carry its state from step to step on the device."""

from graphscale.lowering.thresholds import Thresholds
from graphscale.session.interface import InputSpec
from graphscale.session.result import GradientRange, StepResult
from graphscale.session.session import Session

__all__ = ["GradientRange", "InputSpec", "Session", "StepResult", "Thresholds"]
