"""The lists of mixed precision, by operator: see `graphscale.operators.casting`."""

from __future__ import annotations

from graphscale.operators import OPERATORS, CastRule, Colour

__all__ = ["CastRule", "Colour", "default_rules"]


def default_rules() -> dict[tuple[str, str], CastRule]:
    """Return the rule of each known operator, by domain and name; an operator that has none is denied."""
    return {key: operator.casting for key, operator in OPERATORS.items() if operator.casting is not None}
