"""Verification of scaled graphs against the originals: `graphscale.verify`."""

from graphscale.verification.report import Case, Check, Difference, VerifyReport
from graphscale.verification.verify import verify

__all__ = ["Case", "Check", "Difference", "VerifyReport", "verify"]
