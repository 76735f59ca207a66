"""A `Bench` in another process: the calls go to `worker.py` under the interpreter that has the framework."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from training_steps.sides import Time

__all__ = ["Remote"]

WORKER = Path(__file__).with_name("worker.py")


class Remote:
    """The sides of PyTorch or TensorFlow.

    Args:
        framework: `torch`, `tensorflow` or `keras`.
        python: an interpreter that has it.
        threads: how many it computes with.
        quick: whether workloads are the tiny ones.
        spinning: whether threads of OpenMP may spin while they wait.

    Attributes:
        version: of the framework.

    Raises:
        RuntimeError: the process ended; what it said is on stderr.
    """

    def __init__(self, framework: str, python: Path, threads: int, quick: bool, *, spinning: bool) -> None:
        command = [str(python), str(WORKER), framework, "--threads", str(threads), *(["--quick"] if quick else [])]
        # OpenMP takes its number of threads, and that they sleep while they wait, from the environment alone.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "2"}
        if not spinning:
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        self._name = framework
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.version: str = self._answer()

    def prepare(self, name: str) -> list[str]:
        """As `Bench.prepare`."""
        found: list[str] = self._call("prepare", name)
        return found

    def run(self, name: str, steps: int) -> Time:
        """As `Bench.run`."""
        return Time(**self._call("run", name, steps))

    def check(self) -> dict[str, Any]:
        """As `Bench.check`."""
        found: dict[str, Any] = self._call("check")
        return found

    def close(self) -> None:
        """As `Bench.close`."""
        self._call("close")

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _call(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} ended with exit code {self._process.wait()}")
        return json.loads(line)
