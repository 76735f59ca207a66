"""Running a scaled training step: the carried state goes from each step to the next by itself, on the device."""

from graphscale.lowering.thresholds import Thresholds
from graphscale.session.interface import InputSpec
from graphscale.session.result import GradientRange, StepResult
from graphscale.session.session import Session

__all__ = ["GradientRange", "InputSpec", "Session", "StepResult", "Thresholds"]
