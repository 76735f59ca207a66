"""Benches in other processes: the calls go to a worker under the interpreter that has the framework."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training_steps.sides import Time

__all__ = ["Process", "Remote", "RemoteDevice"]

WORKER = Path(__file__).with_name("worker.py")
DEVICE_WORKER = Path(__file__).with_name("device_worker.py")


class Process:
    """A process that answers calls, which come as lines of JSON.

    Args:
        name: its name in messages.
        command: the command that starts it.
        environment: its own variables.

    Attributes:
        version: its first line, a version.

    Raises:
        RuntimeError: the process ended; what it said is on stderr.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.version: str = self._answer()

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


class Remote(Process):
    """A `Bench` of PyTorch, TensorFlow or another ONNX Runtime.

    Args:
        framework: `torch`, `tensorflow`, `keras`, or `runtime` for ONNX Runtime.
        python: an interpreter that has it.
        threads: number of threads.
        quick: whether workloads are the tiny ones.
        spinning: whether threads of OpenMP may spin while they wait.
        arguments: more ones of `worker.py`.

    Attributes:
        version: of the framework.

    Raises:
        RuntimeError: the process ended; what it said is on stderr.
    """

    def __init__(
        self,
        framework: str,
        python: Path,
        threads: int,
        quick: bool,
        *,
        spinning: bool,
        arguments: Sequence[str] = (),
    ) -> None:
        command = [str(python), str(WORKER), framework, "--threads", str(threads), *(["--quick"] if quick else [])]
        command += arguments
        # OpenMP takes its number of threads, and that they sleep while they wait, from the environment alone.
        environment = {"OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "2"}
        if not spinning:
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        super().__init__(framework, command, environment)

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


class RemoteDevice(Process):
    """A `DeviceBench` of PyTorch.

    Args:
        python: an interpreter that has it.
        arguments: of `device_worker.py`.
        threads: number of threads on the CPU.

    Attributes:
        version: of PyTorch and CUDA.

    Raises:
        RuntimeError: the process ended; what it said is on stderr.
        ValueError: a call raised it there.
    """

    def __init__(self, python: Path, arguments: Sequence[str], threads: int) -> None:
        command = [str(python), str(DEVICE_WORKER), "--threads", str(threads), *arguments]
        super().__init__("PyTorch", command, {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"})

    def _call(self, method: str, *arguments: Any) -> Any:
        answer = super()._call(method, *arguments)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    def prepare(self, name: str) -> dict[str, Any]:
        """As `DeviceBench.prepare`."""
        found: dict[str, Any] = self._call("prepare", name)
        return found

    def check(self) -> dict[str, Any]:
        """As `DeviceBench.check`."""
        found: dict[str, Any] = self._call("check")
        return found

    def run(self, name: str, steps: int) -> dict[str, Any]:
        """As `DeviceBench.run`."""
        found: dict[str, Any] = self._call("run", name, steps)
        return found

    def close(self) -> None:
        """As `DeviceBench.close`."""
        self._call("close")
