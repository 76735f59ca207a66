"""One table with all that graphscale knows of operators: degree rules, traits, the lists of mixed precision.

The rules follow the operators' definitions in the ONNX specification (ai.onnx) and in ONNX Runtime's contrib and
training operator documentation (com.microsoft). A module of this package holds the rows of one subject.
"""

from graphscale.operators import arithmetic, control, layers, microsoft, shape  # noqa: F401 - they fill the table
from graphscale.operators.casting import CastRule, Colour
from graphscale.operators.fate import KINDS, LOST, Fate, Survival
from graphscale.operators.rules import ALL, FIRST, Kind, Rule
from graphscale.operators.table import (
    MICROSOFT,
    OPERATORS,
    PREVIEW_TRAINING,
    Optimizer,
    attribute,
    constant_tensor,
    has_trait,
    may_bend,
    nodes_with,
    optimizer_of,
    overwritten_inputs,
    rule_of,
    survival_of,
    writing_nodes,
    written_inputs,
)
from graphscale.operators.traits import Trait

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
    "Optimizer",
    "Rule",
    "Survival",
    "Trait",
    "attribute",
    "constant_tensor",
    "has_trait",
    "may_bend",
    "nodes_with",
    "optimizer_of",
    "overwritten_inputs",
    "rule_of",
    "survival_of",
    "writing_nodes",
    "written_inputs",
]
