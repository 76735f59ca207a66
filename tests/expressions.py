"""Nodes of ONNX's text form, written as expressions."""

from __future__ import annotations

import ast
import re

_OPERATORS = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.MatMult: "MatMul", ast.Pow: "Pow"}


def nodes(text: str) -> str:
    """Write assignments such as `w_next = w - rate * dw`, one per line or between semicolons, as nodes.

    A call names an operator, with its attributes as keywords: `ReduceSum(x, axes, keepdims=0)`; `x.T` is the
    transposed matrix.
    """
    lines: list[str] = []

    def add(name: str, tree: ast.expr) -> str:
        attributes: list[ast.keyword] = []
        match tree:
            case ast.Name(id=known):
                return known
            case ast.BinOp(left, operator, right):
                op_type, operands = _OPERATORS[type(operator)], [left, right]
            case ast.Attribute(value=matrix, attr="T"):
                op_type, operands = "Transpose<perm = [1, 0]>", [matrix]
            case ast.Call(ast.Name(id=op_type), operands, attributes):
                pass
        inputs = [add(f"{name}_{i}", operand) for i, operand in enumerate(operands)]
        given = ", ".join(f"{a.arg} = {ast.unparse(a.value)}" for a in attributes).replace("'", '"')
        lines.append(f"{name} = {op_type}{given and f'<{given}>'}({', '.join(inputs)})")
        return name

    for assignment in filter(None, map(str.strip, re.split("[;\n]", text))):
        name, _, expression = assignment.partition(" = ")
        add(name, ast.parse(expression, mode="eval").body)
    return "\n".join([*lines, ""])
