"""A framework's sides in a process of their own, for an interpreter that has the framework.

    python benchmarks/training_steps/worker.py torch|tensorflow|keras|runtime --threads N [--quick]
        [--graphs FOLDER] [--lowered]

Calls come as lines of JSON, `[method of Bench, arguments]`, on stdin, and each is answered by a line on stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from training_steps.sides import Bench, Time  # noqa: E402


def main() -> None:
    """Answer calls until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["torch", "tensorflow", "keras", "runtime"])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--graphs", type=Path, help="the steps of ONNX Runtime")
    parser.add_argument("--lowered", action="store_true", help="the lowered ones alone")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a framework prints is not an answer
    module = importlib.import_module(f"training_steps.{options.framework}_sides")
    steps = [] if options.graphs is None else [options.graphs, options.lowered]
    bench = Bench(module.maker(options.threads, *steps), options.quick)
    print(json.dumps(module.version()), file=answers)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        result = getattr(bench, method)(*arguments)
        print(json.dumps(dataclasses.asdict(result) if isinstance(result, Time) else result), file=answers)


if __name__ == "__main__":
    main()
