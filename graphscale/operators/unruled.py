"""Operators without a row, on purpose: a gradient does not pass them, and a graph where one does is refused."""

from __future__ import annotations

from graphscale.operators.table import MICROSOFT

__all__ = ["UNRULED"]

_REASONS = {
    ("", "it computes with text or files"): "ImageDecoder RegexFullMatch StringConcat StringSplit TfIdfVectorizer",
    ("", "a sequence of gradients cannot be divided"): "SequenceErase SequenceMap",
    ("ai.onnx.preview.training", "it asks the runtime to differentiate"): "Gradient",
    (MICROSOFT, "it is there for inference: graphs that train have the operators that it is fused from"): (
        "Attention BiasAdd BiasSplitGelu ConvTransposeWithDynamicPads DecoderAttention DecoderMaskedMultiHeadAttention "
        "DecoderMaskedSelfAttention EmbedLayerNormalization FusedMatMulActivation GatedRelativePositionBias "
        "GemmFastGelu GemmFloat8 GemmaRotaryEmbedding GroupNorm GroupQueryAttention LongformerAttention "
        "MaxpoolWithMask MoE MultiHeadAttention NhwcConv NhwcFusedConv NhwcMaxPool PackedAttention "
        "PackedMultiHeadAttention RelativePositionBias RemovePadding RestorePadding RotaryEmbedding SkipGroupNorm "
        "SparseAttention TorchEmbedding WordConvEmbedding AttnLSTM"
    ),
    (MICROSOFT, "it computes with quantized numbers"): (
        "DequantizeBFP DequantizeLinear DequantizeWithOrder DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulBnb4 "
        "MatMulFpQ4 MatMulInteger16 MatMulIntegerToFloat MatMulNBits MulInteger QAttention QEmbedLayerNormalization "
        "QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu "
        "QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere QMoE QOrderedAttention QOrderedGelu "
        "QOrderedLayerNormalization QOrderedLongformerAttention QOrderedMatMul QuantizeBFP QuantizeLinear "
        "QuantizeWithOrder ReduceSumInteger"
    ),
    (MICROSOFT, "it generates or looks up text"): (
        "BeamSearch BifurcationDetector GreedySearch MurmurHash3 NGramRepeatBlock Sampling Tokenizer WhisperBeamSearch"
    ),
    (MICROSOFT, "exporters write the operator of ai.onnx, or functions of it"): (
        "CDist ComplexMul ComplexMulConj Constant CropAndResize DynamicTimeWarping GridSample Inverse Irfft Pad Range "
        "Rfft SampleOp SparseToDenseMatMul UnfoldTensor Unique"
    ),
    (MICROSOFT, "it compresses activations, which is not linear"): (
        "GistBinarizeDecoder GistBinarizeEncoder GistPack16Decoder GistPack16Encoder GistPack1Decoder GistPack1Encoder "
        "GistPack8Decoder GistPack8Encoder GistPackMsfp15Decoder GistPackMsfp15Encoder"
    ),
    (MICROSOFT, "it runs code of others, whose effect is not known"): "EPContext PythonOp PythonOpGrad Snpe TritonOp",
    (MICROSOFT, "it exchanges values with other processes or with the caller in the middle of a step"): (
        "AdasumAllReduce MegatronF MegatronG RecordEvent Recv Send WaitEvent YieldOp"
    ),
    (MICROSOFT, "it is part of a mixed-precision trainer that scales the loss by itself"): "MixedPrecisionScale",
    (MICROSOFT, "it writes a log"): "SummaryHistogram SummaryMerge SummaryScalar SummaryText",
}

# By domain and name: why an operator has no row.
UNRULED = {(domain, name): reason for (domain, reason), names in _REASONS.items() for name in names.split()}
