"""The sides of PyTorch on a device: eager float32 and autocast to float16, without and with `torch.amp.GradScaler`."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from training_steps.device_bench import FLOAT16, DeviceSide, Facts, State, Ways
from training_steps.sides import PLAIN
from training_steps.torch_networks import loss_of, network, optimizer
from training_steps.workloads import INCREMENT_PERIOD, INITIAL_LOSS_SCALE, Arrays, Workload

__all__ = ["NAMES", "SCALER", "TorchSide", "opener", "version"]

SCALER = "GradScaler"
NAMES = (PLAIN, SCALER, FLOAT16, f"{FLOAT16}-{SCALER}")
_SYNC = "synchronizing CUDA operation"  # what a warning of PyTorch's debug mode calls it

Batch = dict[str, torch.Tensor]


def version() -> str:
    """PyTorch's version, and that of its CUDA."""
    return f"{torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else str(torch.__version__)


class TorchSide:
    """The loop of the tutorials.

    AdamW is the fused one, which takes the loss scale and whether an overflow was found into its kernel; SGD is
    PyTorch's default, one kernel for many weights on a GPU.

    Args:
        workload: the network and its task.
        device: `cuda` or `cpu`.
        low: whether the forward pass is in autocast to float16.
        scaled: whether there is a GradScaler.
    """

    def __init__(self, workload: Workload, device: str, *, low: bool, scaled: bool) -> None:
        self._device, self._low = device, low
        self._net: Any = network(workload).to(device)
        self._optimizer: Any = optimizer(workload, self._net, fused=True)
        self._scaler = torch.amp.GradScaler(
            device, init_scale=INITIAL_LOSS_SCALE, growth_interval=INCREMENT_PERIOD, enabled=scaled
        )

    def step(self, batch: Batch, *, fetch: bool) -> float | None:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device, torch.float16, enabled=self._low):
            loss = loss_of(self._net, batch)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return float(loss.detach()) if fetch else None

    def weights(self) -> Arrays:
        return {name: weight.detach().cpu().numpy().copy() for name, weight in self._net.named_parameters()}

    def loss_scale(self) -> State | None:
        if not self._scaler.is_enabled():
            return None
        return self._scaler.get_scale(), self._scaler._get_growth_tracker()

    def close(self) -> None:
        self._net = self._optimizer = None
        if self._device == "cuda":
            torch.cuda.empty_cache()  # what it keeps, ONNX Runtime cannot have


def opener(device: str, threads: int, *, tf32: bool) -> Callable[[Workload], Ways]:
    """Return the function that opens a workload."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def open_workload(workload: Workload) -> Ways:
        batches = [
            {name: torch.from_numpy(array).to(device) for name, array in batch.items()} for batch in workload.batches()
        ]

        def made(name: str) -> DeviceSide:
            return TorchSide(workload, device, low=name.startswith(FLOAT16), scaled=name.endswith(SCALER))

        def facts(names: Sequence[str]) -> dict[str, Facts]:
            return {name: _facts(made, name, batches[0]) if device == "cuda" else Facts() for name in names}

        def unsupported(name: str) -> str | None:
            """PyTorch has not always had float16 kernels for a CPU."""
            if device == "cuda" or not name.startswith(FLOAT16):
                return None
            try:
                made(name).step(batches[0], fetch=True)
            except RuntimeError as error:
                return f"PyTorch {torch.__version__} cannot run it on a CPU: {str(error).splitlines()[0]}"
            return None

        makers = {name: functools.partial(made, name) for name in NAMES}
        return Ways(makers, batches, facts, synchronize, unsupported)

    return open_workload


def _facts(made: Callable[[str], DeviceSide], name: str, batch: Batch) -> Facts:
    """Run some steps of a side, the last in PyTorch's debug mode, which warns wherever the host waits."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, side = torch.cuda.memory_reserved(), made(name)
    for _ in range(2):
        side.step(batch, fetch=False)
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_reserved() - before
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            side.step(batch, fetch=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.close()
    return Facts(syncs=sum(_SYNC in str(warning.message) for warning in seen), memory=memory)
