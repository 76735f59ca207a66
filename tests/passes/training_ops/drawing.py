"""Random cases: an operator's recipe draws operands and attributes; opset and axes are drawn here.

A family of operators is a module of `families/` with recipes, which is found without registration.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.recipes.draw import Draw as Choices
from tests.passes.training_ops import families
from tests.passes.training_ops.cases import Case

# The opsets that onnxruntime-training 1.19.2 runs and the pass takes.
OPSETS = (10, 12, 13, 17, 18, 21)


class Draw(Choices):
    """Random choices for one case: those of the degree tests, on numbers like those of a training step.

    Attributes:
        op: the operator.
        opset: the version of ai.onnx.
    """

    def __init__(self, choices: random.Random, operator: tuple[str, str], opsets: Iterable[int]) -> None:
        super().__init__(choices, operator, choices.choice(tuple(opsets)))
        self.dtype = np.float32
        self.operator = operator

    def floats(self, shape: Iterable[int], *, positive: bool = False, dtype: Any = None) -> np.ndarray:
        """Draw normally distributed numbers, some of them zero."""
        generator = self._generator()
        array = generator.standard_normal(tuple(shape)) * (generator.random(tuple(shape)) > 0.05)
        return np.asarray(np.abs(array) if positive else array, dtype or self.dtype)

    def case(self, *inputs: Any, **options: Any) -> Case:
        """Make a case of the operands; the options are fields of `Case`."""
        domain, op_type = self.operator
        fields = {"domain": domain, "opset": self.opset, "static": self.chance(50), **options}
        return Case(op_type, inputs, **fields)


Recipe = Callable[[Draw], Case]
# The recipe of each operator, its opsets, and the family that it belongs to.
RECIPES: dict[tuple[str, str], tuple[Recipe, tuple[int, ...], str]] = {}


def recipe(names: str, domain: str = MICROSOFT, opsets: tuple[int, ...] = OPSETS) -> Callable[[Recipe], Recipe]:
    """Enter a recipe for these operators."""

    def enter(draw: Recipe) -> Recipe:
        family = draw.__module__.rsplit(".", 1)[-1]
        RECIPES.update({(domain, name): (draw, opsets, family) for name in names.split()})
        return draw

    return enter


def draw_case(operator: tuple[str, str], choices: random.Random) -> Case:
    """Draw a case of an operator."""
    draw, opsets, _ = RECIPES[operator]
    return draw(Draw(choices, operator, opsets))


def load_families() -> None:
    """Import all families, to enter their recipes."""
    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
