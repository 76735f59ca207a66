"""The operators of ONNX Runtime's stock builds beyond ONNX: all others of its domains need a training build."""

from __future__ import annotations

import onnx
import onnx_ir as ir

__all__ = ["STOCK_OPERATORS", "needs_training_build"]

# Operators beyond ONNX with kernels in stock builds, found in the CPU provider of onnxruntime 1.32.0: those of
# com.microsoft, and ONNX Runtime's own in the domain of ONNX.
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


def needs_training_build(node: ir.Node) -> bool:
    """Return whether stock ONNX Runtime lacks a node's operator."""
    is_undefined = node.domain == "com.microsoft" or (not node.domain and not onnx.defs.has(node.op_type))
    return is_undefined and (node.domain, node.op_type) not in STOCK_OPERATORS
