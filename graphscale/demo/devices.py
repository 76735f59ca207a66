"""The devices of the demo."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CPU", "CUDA", "choose_target"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def choose_target(providers: Sequence[str]) -> str:
    """Return the target for execution providers: `ort-cuda` where CUDA is one of them, otherwise `onnx`."""
    return "ort-cuda" if CUDA in providers else "onnx"
