"""Cases with the results of onnxruntime-training's kernels, kept in files for runtimes without these kernels.

A file holds one flat array for each type of numbers, and the facts of all cases in JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.operators.values import Data
from tests.passes.training_ops.cases import Case

FOLDER = Path(__file__).parent / "recorded"

Recorded = tuple[Case, list[Data]]


def write_cases(path: Path, cases: Iterable[Recorded]) -> None:
    """Write cases with their results."""
    numbers: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def shelve(value: Data | None) -> Any:
        if isinstance(value, list):
            return [shelve(item) for item in value]
        if value is None:
            return None
        numbers[str(value.dtype)].append(np.ravel(value))
        return {"dtype": str(value.dtype), "shape": value.shape}

    facts = []
    for case, results in cases:
        fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
        sides = {"inputs": shelve([*fields.pop("inputs")]), "results": shelve(results)}
        facts.append({**fields, **sides})
    arrays = {dtype: np.concatenate(parts) for dtype, parts in numbers.items()}
    np.savez_compressed(path, cases=np.asarray(json.dumps(facts)), **arrays)


def read_cases(path: Path) -> Iterator[Recorded]:
    """Read cases with their results."""
    with np.load(path) as stored:
        arrays = dict(stored)
    places: defaultdict[str, int] = defaultdict(int)

    def fetch(fact: Any) -> Data | None:
        if isinstance(fact, list):
            return [fetch(item) for item in fact]
        if fact is None:
            return None
        dtype, size = fact["dtype"], int(np.prod(fact["shape"]))
        start = places[dtype]
        places[dtype] += size
        return arrays[dtype][start : start + size].reshape(fact["shape"])

    for fields in json.loads(str(arrays["cases"])):
        inputs, results = fetch(fields.pop("inputs")), fetch(fields.pop("results"))
        for name in ("unnamed", "constants"):
            fields[name] = tuple(fields[name])
        fields["shapes"] = tuple(map(tuple, fields.get("shapes", ())))
        yield Case(inputs=tuple(inputs), **fields), results
