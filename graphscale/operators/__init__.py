"""One table with all that graphscale knows of operators: degree rules, traits, the lists of mixed precision.

The rules follow the operators' definitions in the ONNX specification (ai.onnx) and in ONNX Runtime's contrib and
training operator documentation (com.microsoft). A module of this package holds the rows of one subject.
"""

from graphscale.operators import arithmetic, control, layers, microsoft, shape  # noqa: F401 - they fill the table
from graphscale.operators.columns import ALL, FIRST, KINDS, LOST, CastRule, Colour, Fate, Kind, Rule, Survival, Trait
from graphscale.operators.table import (
    MICROSOFT,
    OPERATORS,
    PREVIEW_TRAINING,
    Operator,
    Optimizer,
    attribute,
    constant_tensor,
    has_trait,
    may_bend,
    nodes_with,
    operators_with,
    optimizer_of,
    overwritten_inputs,
    rule_of,
    survival_of,
    writing_nodes,
    written_inputs,
)

__all__ = [
    "ALL",
    "FIRST",
    "KINDS",
    "LOST",
    "MICROSOFT",
    "OPERATORS",
    "PREVIEW_TRAINING",
    "CastRule",
    "Colour",
    "Fate",
    "Kind",
    "Operator",
    "Optimizer",
    "Rule",
    "Survival",
    "Trait",
    "attribute",
    "constant_tensor",
    "has_trait",
    "may_bend",
    "nodes_with",
    "operators_with",
    "optimizer_of",
    "overwritten_inputs",
    "rule_of",
    "survival_of",
    "writing_nodes",
    "written_inputs",
]
