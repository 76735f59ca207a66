"""Recipes: for each operator, how to draw a node with operands that a runtime accepts.

Each module enters its operators into `RECIPES`.
"""

import random

from tests.operators.cases import Case, make_case
from tests.operators.recipes import (
    control,
    effects,
    elementwise,
    gradients,
    layout,
    microsoft,
    products,
    reductions,
    signals,
)
from tests.operators.recipes.draw import RECIPES, Call, Draw

__all__ = [
    "RECIPES",
    "Call",
    "Draw",
    "control",
    "draw_case",
    "effects",
    "elementwise",
    "gradients",
    "layout",
    "microsoft",
    "products",
    "reductions",
    "signals",
]


def draw_case(operator: tuple[str, str], choices: random.Random, opsets: range) -> Case:
    """Draw a node of an operator in one of these opsets."""
    domain, name = operator
    opset = choices.choice(opsets)
    call = RECIPES[operator](Draw(choices, operator, opset))
    return make_case(
        f"{name}-{opset}",
        name,
        call.operands,
        opset=opset,
        outputs=call.outputs,
        domain=domain,
        captured=call.captured,
        attributes=call.attributes,
        results=call.results,
    )
