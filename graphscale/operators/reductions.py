"""ai.onnx: one number for all numbers along some axes."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators.casting import CLEAR, INFER, deny
from graphscale.operators.rules import FIRST, NONLINEAR, Kind, Rule
from graphscale.operators.table import row
from graphscale.operators.traits import Trait

_POWER = deny("powers leave the range of float16")
_EXPONENTIATES = deny("it exponentiates and sums; its small results are lost in float16")
_STATISTIC = deny("a mean is a statistic, the sum of a long axis")
_REDUCE = Trait.REDUCTION | Trait.TOTAL_BY_AXES
_DEGREE_0 = Rule(Kind.DEGREE_0)

row("ReduceSum", FIRST, _REDUCE | Trait.NONFINITE_OF_FIRST, INFER)
row("ReduceMean", FIRST, _REDUCE | Trait.NONFINITE_OF_FIRST, _STATISTIC)
row("ReduceL1", FIRST, _REDUCE | Trait.NONFINITE_OF_FIRST, INFER)
row("ReduceMax ReduceMin", FIRST, Trait.REDUCTION | Trait.LOSES_NAN, CLEAR)
row("CumSum", FIRST, casting=_STATISTIC)
# Of another degree than 1: unscaled first, so that S*S never arises. So is the root of a sum of squares.
row("ReduceL2 ReduceSumSquare", NONLINEAR, _REDUCE | Trait.NONFINITE_OF_FIRST, _POWER)
row("ReduceProd", NONLINEAR, Trait.REDUCTION, _POWER)
row("CumProd", NONLINEAR, casting=_POWER)
row("ReduceLogSum ReduceLogSumExp", NONLINEAR, Trait.REDUCTION, _EXPONENTIATES)
row("ArgMax ArgMin", _DEGREE_0, Trait.LOSES_NAN, CLEAR, dtype=ir.DataType.INT64)
