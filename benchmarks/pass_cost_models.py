"""Writes the models of pass_cost.py, and prints how many nodes they have.

python benchmarks/pass_cost_models.py gpt|residual NODES STEP.onnx
python benchmarks/pass_cost_models.py large BLOCKS WIDTH STEP.onnx        (weights in STEP.data beside it)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx_ir as ir
from gpt_like import Size, blocks_for, gpt_step
from residual import NODES_PER_LAYER, training_graph

HEADS, CONTEXT, VOCABULARY, BATCH = 16, 1024, 50_257, 8


def make(kind: str, *numbers: int, path: Path) -> ir.Model:
    """A training step; `numbers` are the nodes wanted, or, for a large one, the blocks and their width."""
    if kind == "gpt":
        return gpt_step(Size(blocks_for(numbers[0])))
    if kind == "residual":
        return training_graph(max(1, round(numbers[0] / NODES_PER_LAYER)))
    blocks, width = numbers
    return gpt_step(Size(blocks, width, HEADS, CONTEXT, VOCABULARY, BATCH), path.with_suffix(".data"))


def main() -> None:
    kind, *numbers, name = sys.argv[1:]
    model = make(kind, *map(int, numbers), path=Path(name))
    ir.save(model, name)
    print(json.dumps({"nodes": len(model.graph)}))


if __name__ == "__main__":
    main()
