"""The lists of mixed precision: where an operator may compute in float16.

The lists are those of TensorFlow's graph rewrite (grappler's auto_mixed_precision), carried over to ONNX and to the
gradient operators of ONNX Runtime:

- allow: always in float16. They are where the time goes, and hardware adds up their products in float32.
- infer: safe in float16, but not worth a cast; in float16 between allowed operators, unless the result of a denied one
  reaches them.
- clear: they move, select or compare numbers and round none; in float16 wherever that saves a cast.
- deny: never in float16, each for a reason.
"""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["ALLOW", "CLEAR", "INFER", "CastRule", "Colour", "deny", "infer"]


class Colour(enum.Enum):
    """The list that an operator is on."""

    ALLOW = "allow"
    INFER = "infer"
    CLEAR = "clear"
    DENY = "deny"


@dataclasses.dataclass(frozen=True)
class CastRule:
    """The treatment of an operator by mixed precision.

    Attributes:
        colour: its list.
        reason: for a denied one, why.
        wide_inputs: operands that stay float32 where the operator is in float16: statistics, ratios.
        wide_outputs: results that do.
    """

    colour: Colour
    reason: str = ""
    wide_inputs: tuple[int, ...] = ()
    wide_outputs: tuple[int, ...] = ()


ALLOW = CastRule(Colour.ALLOW)
INFER = CastRule(Colour.INFER)
CLEAR = CastRule(Colour.CLEAR)


def infer(wide_inputs: tuple[int, ...] = (), wide_outputs: tuple[int, ...] = ()) -> CastRule:
    """Return the treatment of an operator on the infer list some of whose operands or results stay float32."""
    return CastRule(Colour.INFER, wide_inputs=wide_inputs, wide_outputs=wide_outputs)


def deny(reason: str) -> CastRule:
    """Return the treatment of an operator that stays float32."""
    return CastRule(Colour.DENY, reason)
