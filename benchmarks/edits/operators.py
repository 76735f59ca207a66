"""Operators that can replace one another, and operators that can be inserted into an edge."""

from __future__ import annotations

from onnx import TensorProto

__all__ = ["PAIRS", "SYNONYMS"]

SYNONYMS = (
    ("Mul", "Div", "Add", "Sub", "Pow", "Mod", "PRelu", "BitShift"),
    ("Max", "Min", "Sum", "Mean"),
    ("Mul", "Add", "Sum", "Max", "Min", "Mean", "Div", "Sub"),
    ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"),
    ("And", "Or", "Xor"),
    ("IsNaN", "IsInf"),
    ("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Softplus", "Abs", "Neg", "Identity", "Sign", "HardSwish", "Gelu"),
    ("Floor", "Ceil", "Round", "Identity", "Sqrt", "Exp", "Log", "Reciprocal", "Tanh", "Erf", "Sigmoid", "Sin", "Cos"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"),
    ("ReduceSum", "ReduceLogSumExp", "ReduceLogSum"),
    ("Squeeze", "Unsqueeze", "Reshape", "Expand", "Flatten", "Identity"),
    ("Gather", "GatherND", "GatherElements"),
    ("ScatterElements", "ScatterND", "Scatter"),
    ("Softmax", "LogSoftmax", "Hardmax"),
    ("MatMul", "Gemm", "MatMulInteger"),
    ("Conv", "ConvTranspose"),
    ("MaxPool", "AveragePool", "LpPool"),
    ("Shape", "Size"),
    ("ArgMax", "ArgMin"),
    ("Not", "Identity", "Cast"),
    ("InPlaceAccumulatorV2", "InPlaceAccumulator", "ZeroGradient"),
    ("IsAllFinite", "IsFinite", "ReduceAllL2"),
    ("Where", "Clip", "If"),
)

# Chains that can stand in an edge, each of (operator, second operand or attributes).
PAIRS: tuple[tuple[tuple[str, object], ...], ...] = (
    *(((name, None),) for name in ("Identity", "Neg", "Abs", "Relu", "Sign", "Floor", "Not", "Reciprocal", "Exp")),
    (("Neg", None), ("Neg", None)),
    (("Cast", {"to": TensorProto.DOUBLE}), ("Cast", {"to": TensorProto.FLOAT})),
    (("Cast", {"to": TensorProto.FLOAT16}), ("Cast", {"to": TensorProto.FLOAT})),
    (("Cast", {"to": TensorProto.BFLOAT16}), ("Cast", {"to": TensorProto.FLOAT})),
    (("Cast", {"to": TensorProto.FLOAT}),),
    (("Cast", {"to": TensorProto.INT64}),),
    (("Clip", None),),
    (("Clip", 0.0),),
    (("Add", 0.0),),
    (("Add", -0.0),),
    (("Sub", 0.0),),
    (("Mul", 1.0),),
    (("Div", 1.0),),
    (("Pow", 1.0),),
    (("Mul", 2.0),),
    (("Mul", 0.0),),
    (("Max", 0.0),),
    (("Sum", None),),
    (("Dropout", None),),
    (("Squeeze", None),),
    (("Flatten", None),),
    (("Shape", None),),
)
