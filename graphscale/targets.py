"""The runtimes: the only place that knows about their kernels and versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from graphscale.errors import TargetError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "CPU_PROVIDER",
    "CUDA_PROVIDER",
    "IN_ONNX_DOMAIN",
    "MIN_OPSET",
    "RELEASES",
    "TARGETS",
    "TRAINING_BUILD",
    "WITHOUT_KERNEL",
    "Release",
    "Target",
    "advise",
    "choose_target",
    "default_opset",
    "get_target",
    "get_training_target",
    "target_names",
]


@dataclasses.dataclass(frozen=True)
class Release:
    """A release of ONNX Runtime.

    Attributes:
        number: its major and minor version.
        max_opset: the newest version of the ai.onnx opset that it loads.
        max_ir_version: the newest IR version that it loads.
    """

    number: tuple[int, int]
    max_opset: int
    max_ir_version: int


# Found by loading a model of each version: in onnxruntime-training 1.19.2, and in each stock release from 1.20 to 1.32.
# A release that is not listed has the limits of the one before it.
RELEASES = (
    Release((1, 19), 21, 10),
    Release((1, 20), 21, 10),
    Release((1, 21), 22, 10),
    Release((1, 23), 23, 11),
    Release((1, 24), 25, 13),
    Release((1, 25), 26, 13),
    Release((1, 32), 28, 14),
)
# onnxruntime-gpu has no 1.32.
_TRAINING, _NEWEST_GPU, _NEWEST = RELEASES[0], RELEASES[-2], RELEASES[-1]


@dataclasses.dataclass(frozen=True)
class Target:
    """A runtime that executes scaled graphs.

    Attributes:
        name: its name for users.
        is_all_finite: it has a kernel for `com.microsoft.IsAllFinite` (CUDA builds of onnxruntime-training only); else
            standard ops are used.
        cuda: it computes on a GPU, where no node should wait for the host.
        in_place: it has a kernel for `com.microsoft.InPlaceAccumulatorV2`, so that float32 state which has an
            initializer can live in the session; else all state is carried through inputs and outputs.
        release: its newest release.
        runs_on: the runtime's name, for messages.
        packages: the distributions that contain it.
        wide_ops: operators of com.microsoft that the runtime cannot load in float16.
        bfloat16: it computes in bfloat16.
        plain: the target whose scaled graphs are lowered for this one; empty where graphs are not lowered.
    """

    name: str
    is_all_finite: bool
    cuda: bool
    in_place: bool
    release: Release
    runs_on: str
    packages: tuple[str, ...]
    wide_ops: frozenset[str] = frozenset()
    bfloat16: bool = False
    plain: str = ""

    @property
    def max_opset(self) -> int:
        """The newest version of the ai.onnx opset that it loads."""
        return self.release.max_opset

    @property
    def max_ir_version(self) -> int:
        """The newest IR version that it loads."""
        return self.release.max_ir_version

    def loads(self, model: ir.Model) -> bool:
        """Return whether a release of the runtime loads a model of this IR version and opset."""
        is_known = MIN_IR_VERSION <= model.ir_version <= self.max_ir_version
        return is_known and MIN_OPSET <= default_opset(model) <= self.max_opset


# The CPU provider of onnxruntime-training 1.19.2 crashes while it inserts casts around the first three, and lacks the
# kernels that the others would need then.
_CPU_WIDE = frozenset(
    {"AveragePoolGrad", "ConvGrad", "MaxPoolGrad", "LayerNormalizationGrad", "SliceGrad", "SplitTraining"}
)


# The operators of training builds in the domain of ONNX.
IN_ONNX_DOMAIN = frozenset(
    ("AveragePoolGrad", "MaxPoolGrad", "SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad")
)


# Operators without a kernel in the CPU provider of stock releases up to 1.32.0, from this opset on; before it, each has
# one or does not exist. Found by loading them in every opset. Other operators lack kernels in earlier releases alone.
WITHOUT_KERNEL = {
    "RandomNormal": 22,
    "RandomNormalLike": 22,
    "RandomUniform": 22,
    "RandomUniformLike": 22,
    "Bernoulli": 22,
    "Multinomial": 22,
    "RoiAlign": 22,
    "Swish": 25,  # at 24, ONNX Runtime inlines it as a function
    "SwiGLU": 28,
    "DequantizeLinear": 28,
    "QuantizeLinear": 28,
    "OptionalGetElement": 28,
    "OptionalHasElement": 28,
}

_TRAINING_PACKAGE = ("onnxruntime-training",)
_CUDA_PACKAGES = ("onnxruntime-gpu", *_TRAINING_PACKAGE)
_PACKAGES = ("onnxruntime", *_CUDA_PACKAGES)
_NEWEST_STOCK, TRAINING_BUILD = "onnxruntime 1.32", "onnxruntime-training 1.19.2"

TARGETS = {
    target.name: target
    for target in (
        Target("onnx", False, False, False, _NEWEST, _NEWEST_STOCK, _PACKAGES, _CPU_WIDE),
        Target(
            "ort-cpu", False, False, False, _NEWEST, f"{_NEWEST_STOCK} on the CPU", _PACKAGES, _CPU_WIDE, plain="onnx"
        ),
        Target("ort-cuda", False, True, False, _NEWEST_GPU, "onnxruntime-gpu 1.31", _CUDA_PACKAGES, bfloat16=True),
        Target("ort-training", False, False, True, _TRAINING, TRAINING_BUILD, _TRAINING_PACKAGE, _CPU_WIDE),
        Target(
            *("ort-training-cuda", True, True, True, _TRAINING, f"{TRAINING_BUILD} on CUDA", _TRAINING_PACKAGE),
            bfloat16=True,
        ),
    )
}

# Names of ONNX Runtime's execution providers.
CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"

# Older versions have no constants: each initializer is an input.
MIN_IR_VERSION = 4
# Where, IsNaN and the other inserted operators exist since opset 9 (IsInf since 10).
MIN_OPSET = 10
# The newest opset whose common operators all have CUDA kernels in onnxruntime-training 1.19.2.
_CUDA_OPSET = 20


def target_names(fits: Callable[[Target], bool] = lambda target: True) -> str:
    """Join the names of some targets, as in "onnx, ort-cuda or ort-training"."""
    *others, last = (name for name, target in TARGETS.items() if fits(target))
    return f"{', '.join(others)} or {last}" if others else last


def choose_target(providers: Collection[str]) -> str:
    """Return the target for execution providers: `ort-cuda` where CUDA is one of them, otherwise `onnx`."""
    return "ort-cuda" if CUDA_PROVIDER in providers else "onnx"


def get_target(name: str) -> Target:
    """Return the target with a name.

    Raises:
        TargetError: there is none.
    """
    if name not in TARGETS:
        raise TargetError(f"there is no target {name!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def get_training_target(name: str) -> Target:
    """Return the target with a name, which must have training sessions.

    Raises:
        TargetError: there is none, or it has no training sessions.
    """
    target = get_target(name)
    if not target.in_place:
        names = target_names(lambda target: target.in_place)
        raise TargetError(f"target {name!r} has no training sessions; choose {names}")
    return target


def default_opset(model: ir.Model) -> int:
    """Return the version of ai.onnx that a model imports, or 0."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))


def advise(model: ir.Model, target: Target) -> list[str]:
    """Return notes for running this model on the target, a sentence each."""
    opset = default_opset(model)
    if target.in_place:
        if not target.cuda or opset <= _CUDA_OPSET:
            return []
        return [
            f"{target.runs_on} lacks kernels for Cast, Reshape and others of opset {opset}, and "
            f"copies to the host for them; export with opset {_CUDA_OPSET}"
        ]
    if target.cuda or opset < min(WITHOUT_KERNEL.values()):
        return []
    operators = {node.op_type for node in model.graph.all_nodes() if not node.domain}
    missing = sorted(name for name in operators if opset >= WITHOUT_KERNEL.get(name, opset + 1))
    if not missing:
        return []
    return [
        f"{_NEWEST_STOCK} has no CPU kernel for {', '.join(missing)} of opset {opset}, so its CPU provider cannot run "
        f"the step; export with opset {min(WITHOUT_KERNEL[name] for name in missing) - 1}"
    ]
