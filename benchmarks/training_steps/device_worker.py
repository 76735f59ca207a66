"""PyTorch's sides on a device in a process of their own, for an interpreter that has PyTorch.

    python benchmarks/training_steps/device_worker.py --device cuda|cpu --threads N --ways NAME ...
        [--large BATCH LENGTH] [--quick] [--tf32]

Calls come as lines of JSON, `[method of DeviceBench, arguments]`, on stdin, and each is answered by a line on stdout:
its `result`, or the `error` of a ValueError.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from training_steps.device_bench import DeviceBench  # noqa: E402
from training_steps.device_torch import NAMES, opener, version  # noqa: E402
from training_steps.workloads import large_workloads  # noqa: E402


def main() -> None:
    """Answer calls until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--ways", nargs="*", choices=NAMES, required=True)
    parser.add_argument("--large", nargs=2, type=int, default=(8, 512), metavar=("BATCH", "LENGTH"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    workloads = large_workloads(options.quick, *options.large)
    bench = DeviceBench(opener(options.device, options.threads, tf32=options.tf32), workloads, tuple(options.ways))
    print(json.dumps(version()), file=answers)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"result": getattr(bench, method)(*arguments)}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
