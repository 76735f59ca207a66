"""Running a scaled training step: the carried state goes from each step to the next by itself, on the device."""

from graphscale.session.interface import InputSpec
from graphscale.session.result import StepResult
from graphscale.session.session import Session
from graphscale.session.thresholds import Thresholds

__all__ = ["InputSpec", "Session", "StepResult", "Thresholds"]
