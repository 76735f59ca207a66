"""The comparison of two models: graphs, functions, opsets."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.checks.translation.correspondence import Correspondence, Size, attribute_difference, type_difference
from graphscale.graph.inference import infer_types

__all__ = ["compare_models"]

_INVENTED = "unk__"  # the beginning of an axis name from ONNX's inference


def compare_models(found: ir.Model, expected: ir.Model, where: str = "the graph") -> Correspondence:
    """Compare two models in all but their metadata.

    Args:
        found: the model to check.
        expected: its expected form, which gets inferred types where needed.
        where: its graph, for messages.
    """
    same = Correspondence(found, expected, where)
    _compare_functions(found, expected, same)
    if found.opset_imports != expected.opset_imports:
        same.differences.append(f"the opsets of {where} are {_opsets(found)}, and should be {_opsets(expected)}")
    if found.ir_version < expected.ir_version:
        same.differences.append(f"the IR version of {where} is {found.ir_version}, and should be {expected.ir_version}")
    same.differences += _undeclared(expected, same)
    return same


def _undeclared(expected: ir.Model, same: Correspondence) -> Iterator[str]:
    """Yield declarations that are neither in the expected model nor inferred from it."""
    if not same.declared:
        return
    inferred = _infer_types(expected)
    # Names of axes: a declared name stands for itself, an invented name of inference for a single size.
    values = (*expected.graph.inputs, *(value for node in expected.graph.all_nodes() for value in node.outputs))
    axes = (str(axis) for value in values for axis in value.shape or ())
    names: dict[str, int | str] = {axis: axis for axis in axes if axis.startswith(_INVENTED)}

    def fits(size: Size, wanted: Size) -> bool:
        if isinstance(size, str) and size.startswith(_INVENTED) and wanted is not None:
            return names.setdefault(size, wanted) == wanted
        return size in (None, wanted)

    for value, other in same.declared:
        problem = type_difference(value, inferred.get(other, other), fits)
        if problem is not None:
            yield f"{value.name!r} {problem}"


def _infer_types(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Return a copy with inferred type and shape for each result of a node, in bodies too."""
    inferred, copies = model.clone(), dict[ir.Value, ir.Value]()
    for node, other in zip(model.graph.all_nodes(), inferred.graph.all_nodes(), strict=True):
        for value, copy in zip(node.outputs, other.outputs, strict=True):
            if copy.name:
                copies[value] = copy
                copy.name = f"inferred/{len(copies)}"  # two branches may use one name, which inference refuses
    infer_types(inferred, strict=True)
    return copies


def _opsets(model: ir.Model) -> str:
    return ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(model.opset_imports.items()))


def _compare_functions(found: ir.Model, expected: ir.Model, same: Correspondence) -> None:
    for key in dict.fromkeys((*found.functions, *expected.functions)):
        name = f"the function {'::'.join(filter(None, key))}"
        if key not in expected.functions:
            same.differences.append(f"{name} is neither the original's nor an inserted piece")
        elif key not in found.functions:
            same.differences.append(f"{name} is missing")
        else:
            mine, theirs = found.functions[key], expected.functions[key]
            if mine.opset_imports != theirs.opset_imports or not _have_equal_defaults(mine, theirs):
                same.differences.append(f"{name} has other opsets or attributes than it should")


def _have_equal_defaults(found: ir.Function, expected: ir.Function) -> bool:
    if found.attributes.keys() != expected.attributes.keys():
        return False
    pairs = [(one, expected.attributes[key]) for key, one in found.attributes.items()]
    # A file has no type for an attribute without a default.
    held = [(one, other) for one, other in pairs if (one.value, other.value) != (None, None)]
    return all(attribute_difference(*pair) is None for pair in held)
