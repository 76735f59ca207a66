"""Verification of scaled graphs against the originals: `graphscale.verify`."""

from graphscale.checks.verification.verifier import verify
from graphscale.checks.verification.verify_report import Case, Check, Difference, VerifyReport

__all__ = ["Case", "Check", "Difference", "VerifyReport", "verify"]
