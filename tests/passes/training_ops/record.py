"""Write recorded cases anew, with onnxruntime-training: python -m tests.passes.training_ops.record [FAMILY]..."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from tests.passes.training_ops.cases import run_reference
from tests.passes.training_ops.drawing import RECIPES, draw_case, load_families
from tests.passes.training_ops.recorded_cases import FOLDER, Recorded, write_cases

# Cases of each operator.
COUNT = 6


def record(family: str) -> Iterator[Recorded]:
    """Draw cases of a family, and yield them with the kernels' results."""
    for operator in sorted(name for name, (*_, owner) in RECIPES.items() if owner == family):
        for number in range(COUNT):
            case = draw_case(operator, random.Random(f"{operator[1]}-{number}"))
            yield case, run_reference(case)


def main() -> None:
    load_families()
    families = sys.argv[1:] or sorted({family for *_, family in RECIPES.values()})
    for family in families:
        path = FOLDER / f"{family}.npz"
        write_cases(path, record(family))
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
