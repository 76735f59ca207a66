"""The runtimes: the only place that knows about their kernels and versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from graphscale.errors import TargetError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "STOCK_OPERATORS",
    "TARGETS",
    "Target",
    "advise",
    "check_versions",
    "get_target",
    "get_training_target",
    "target_names",
]


@dataclasses.dataclass(frozen=True)
class Target:
    """A runtime that executes scaled graphs.

    Attributes:
        name: its name for users.
        is_all_finite: it has a kernel for `com.microsoft.IsAllFinite` (CUDA builds of onnxruntime-training only); else
            standard ops are used.
        cuda: it computes on a GPU, where nothing should wait for the host.
        in_place: it has a kernel for `com.microsoft.InPlaceAccumulatorV2`, so that float32 state which has an
            initializer can live in the session; else all state is carried through inputs and outputs.
        max_ir_version: the newest IR version that it loads.
        max_opset: the newest version of the ai.onnx opset that it loads.
        runs_on: for messages.
        wide_ops: operators of com.microsoft that the runtime cannot load in float16.
        bfloat16: it computes in bfloat16.
        plain: the target whose scaled graphs are lowered for this one; empty where graphs are not lowered.
    """

    name: str
    is_all_finite: bool
    cuda: bool
    in_place: bool
    max_ir_version: int
    max_opset: int
    runs_on: str
    wide_ops: frozenset[str] = frozenset()
    bfloat16: bool = False
    plain: str = ""


# The CPU provider of onnxruntime-training 1.19.2 crashes while it inserts casts around the first three, and has no
# kernels for the others that it would need then.
_CPU_WIDE = frozenset(
    {"AveragePoolGrad", "ConvGrad", "MaxPoolGrad", "LayerNormalizationGrad", "SliceGrad", "SplitTraining"}
)

# Operators beyond ONNX that stock builds have kernels for, read off the CPU provider of onnxruntime 1.32.0: those of
# com.microsoft, and those that ONNX Runtime has in the domain of ONNX.
_STOCK_MICROSOFT = """
    Attention AttnLSTM BeamSearch BiasGelu BifurcationDetector BranchwiseRMSNorm CDist CausalConvWithState
    ConvTransposeWithDynamicPads CropAndResize DecoderMaskedMultiHeadAttention DequantizeLinear DynamicQuantizeLSTM
    DynamicQuantizeMatMul DynamicTimeWarping EmbedLayerNormalization EngramGate ExpandDims FastGelu FusedConv
    FusedGemm FusedMatMul GatedAdd GatedDeltaNet GatedRMSNorm GatherBlockQuantized GatherND GatherPacked Gelu
    GreedySearch GridSample GroupQueryAttention HyperConnectionPostMix HyperConnectionPreMix Inverse LinearAttention
    LinearAttentionGate MRotaryEmbedding MatMulBnb4 MatMulFpQ4 MatMulInteger16 MatMulIntegerToFloat MatMulNBits
    MaxpoolWithMask MoE MoEGroupRouter MultiHeadAttention MurmurHash3 NGramHashMapping NGramRepeatBlock NhwcMaxPool
    Pad QAttention QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv
    QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere QMoE
    QuantizeLinear QuickGelu Range RotaryEmbedding SampleOp Sampling ScaledSiLU SkipLayerNormalization
    SkipSimplifiedLayerNormalization SparseAttention SparseToDenseMatMul Tokenizer TransposeMatMul Trilu
    UnfoldTensor Unique VarlenCausalConvWithState VarlenNGramHashMapping WhisperBeamSearch WordConvEmbedding
"""
_STOCK_OTHERS = """
    Affine Crop DynamicSlice ImageScaler MemcpyFromHost MemcpyToHost ParametricSoftplus Scale ScaledTanh
    SimplifiedLayerNormalization
"""
STOCK_OPERATORS = frozenset(
    (domain, name)
    for domain, names in (("com.microsoft", _STOCK_MICROSOFT), ("", _STOCK_OTHERS))
    for name in names.split()
)

# Versions: read off onnxruntime 1.31.1 and onnxruntime-training 1.19.2 by loading a model of each.
TARGETS = {
    target.name: target
    for target in (
        Target("onnx", False, False, False, 13, 26, "onnxruntime 1.31", _CPU_WIDE),
        Target("ort-cpu", False, False, False, 13, 26, "onnxruntime 1.31 on the CPU", _CPU_WIDE, plain="onnx"),
        Target("ort-cuda", False, True, False, 13, 26, "onnxruntime-gpu 1.31", bfloat16=True),
        Target("ort-training", False, False, True, 10, 21, "onnxruntime-training 1.19.2", _CPU_WIDE),
        Target("ort-training-cuda", True, True, True, 10, 21, "onnxruntime-training 1.19.2 on CUDA", bfloat16=True),
    )
}

# Older versions have no constants: each initializer is an input.
MIN_IR_VERSION = 4
# Where, IsNaN and the other operators that are inserted exist since opset 9 (IsInf since 10).
MIN_OPSET = 10
# The newest opset whose common operators all have CUDA kernels in onnxruntime-training 1.19.2.
_CUDA_OPSET = 20


def target_names(fits: Callable[[Target], bool] = lambda target: True) -> str:
    """Join the names of some targets, as in "onnx, ort-cuda or ort-training"."""
    *others, last = (name for name, target in TARGETS.items() if fits(target))
    return f"{', '.join(others)} or {last}" if others else last


def get_target(name: str) -> Target:
    """Return the target of this name.

    Raises:
        TargetError: there is none.
    """
    if name not in TARGETS:
        raise TargetError(f"there is no target {name!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def get_training_target(name: str) -> Target:
    """Return the target of this name, which must have training sessions.

    Raises:
        TargetError: there is none, or it has no training sessions.
    """
    target = get_target(name)
    if not target.in_place:
        names = target_names(lambda target: target.in_place)
        raise TargetError(f"target {name!r} has no training sessions; choose {names}")
    return target


def check_versions(model: ir.Model, target: Target) -> None:
    """Refuse a model that the target cannot load. Its versions are never converted unasked.

    Raises:
        TargetError: the IR version or the opset is out of the target's range.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    if model.ir_version < MIN_IR_VERSION:
        raise TargetError(
            f"the model has IR version {model.ir_version}, without constants; export it with "
            f"ir_version={target.max_ir_version}, or set it: model.ir_version = {MIN_IR_VERSION}"
        )
    if model.ir_version > target.max_ir_version:
        raise TargetError(
            f"the model has IR version {model.ir_version}, and target {target.name!r} ({target.runs_on}) loads up to "
            f"{target.max_ir_version}; export it with ir_version={target.max_ir_version}"
        )
    if not MIN_OPSET <= opset <= target.max_opset:
        raise TargetError(
            f"the model has opset {opset}, and target {target.name!r} ({target.runs_on}) takes {MIN_OPSET} to "
            f"{target.max_opset}; export it with an opset in that range"
        )


def advise(model: ir.Model, target: Target) -> list[str]:
    """Return notes for running this model on the target, a sentence each."""
    if target.cuda and target.in_place and model.opset_imports.get("", 0) > _CUDA_OPSET:
        return [
            f"{target.runs_on} lacks kernels for Cast, Reshape and others of opset {model.opset_imports['']}, and "
            f"copies to the host for them; export with opset {_CUDA_OPSET}"
        ]
    return []
