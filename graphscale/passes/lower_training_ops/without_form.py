"""Operators of ONNX Runtime's training builds without a standard form, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from graphscale.operators import MICROSOFT

__all__ = ["WITHOUT_FORM"]

_REASONS = {
    "it exchanges values with other processes": (
        "MegatronF MegatronG NcclAllGather NcclAllReduce NcclReduceScatter Recv Send"
    ),
    "it calls a Python function": "PythonOp PythonOpGrad",
    "a session on CUDA puts it into its own copy of a graph, and no exporter writes it": (
        "BiasDropout BiasSoftmax BiasSoftmaxDropout BitmaskBiasDropout BitmaskDropout BitmaskDropoutGrad "
        "SoftmaxDropoutGrad"
    ),
    "it has kernels for CUDA alone, and no exporter writes it": "LambOptimizer",
}

# By domain and operator.
WITHOUT_FORM: Mapping[tuple[str, str], str] = {
    (MICROSOFT, name): reason for reason, names in _REASONS.items() for name in names.split()
}
