"""The fate of NaN and infinity in a node: the non-finite numbers of an operand that its result shows."""

from __future__ import annotations

import functools

import onnx_ir as ir

from graphscale.checks.linting.view import is_zero
from graphscale.checks.patterns import is_comparison
from graphscale.graph.values import constant_number, constant_tensor, inputs_of, reads_shape, subgraphs
from graphscale.graph.walks import reach, source_by_trait
from graphscale.operators import Kind, Trait, attribute, has_trait, rule_of

__all__ = [
    "BOTH",
    "INF",
    "NAN",
    "NOTHING",
    "Kinds",
    "is_empty",
    "is_hiding",
    "is_infinite",
    "kinds_of_test",
    "survivors",
]

Kinds = frozenset[str]
NAN, INF = "NaN", "infinity"
BOTH: Kinds = frozenset({NAN, INF})
NOTHING: Kinds = frozenset()

# Types with infinity and NaN; a float8 has no infinity, or loses it in a saturating cast.
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
_QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")
_NONNEGATIVE = {"Abs", "Exp", "Sqrt", "Relu", "Sigmoid", "Softmax", "ReduceL1", "ReduceL2", "ReduceSumSquare"}
# Nodes from a condition up to the test that decides it.
_DEPTH = 50


def survivors(node: ir.Node, value: ir.Value, kinds: Kinds, *, of_all: bool = True) -> Kinds:
    """Return the kinds of an operand's numbers that show in `kinds` of the results of a node.

    Args:
        node: the node.
        value: the operand.
        kinds: the kinds, NaN and infinity, that are noticed in its results.
        of_all: True for all elements of the operand; else only for those that the node passes on.
    """
    rule = rule_of(node)
    if not kinds or is_empty(node):
        return NOTHING
    if rule is not None and rule.kind is Kind.PRODUCT and any(is_zero(v) for v in inputs_of(node) if v is not value):
        return BOTH if NAN in kinds else NOTHING  # 0 * infinity is NaN
    if node.op_type == "Sub" and all(v is value for v in inputs_of(node)):
        return BOTH if NAN in kinds else NOTHING  # and so is infinity - infinity
    if any(subgraphs(node)):
        return kinds & _seen_in_bodies(node, value)
    if has_trait(node, Trait.CAST) or node.op_type in _QUANTIZING:
        return _converted(node, kinds) if value is node.inputs[0] else NOTHING
    if has_trait(node, Trait.PART):
        return NOTHING if of_all else kinds
    if node.op_type == "Where":
        return _selected(node, value, kinds, of_all)
    if has_trait(node, Trait.LOSES_NAN):
        kinds -= {NAN}
    is_lost = has_trait(node, Trait.LOSES_NEGATIVE) and not _is_nonnegative(value)
    if has_trait(node, Trait.LOSES_INFINITY) or is_lost or (node.op_type == "Div" and node.inputs[0] is not value):
        kinds -= {INF}
    return kinds


def is_hiding(node: ir.Node) -> bool:
    """Return whether a node that loses a number converts or replaces it, instead of bounding or comparing it."""
    return has_trait(node, Trait.CAST) or node.op_type in (*_QUANTIZING, "Where") or any(subgraphs(node))


def kinds_of_test(node: ir.Node) -> Kinds:
    """Return the kinds of numbers that a test for finiteness notices."""
    if node.op_type != "IsInf":
        return frozenset({NAN}) if node.op_type == "IsNaN" else BOTH
    both_signs = attribute(node, "detect_positive", 1) and attribute(node, "detect_negative", 1)
    return frozenset({INF}) if both_signs else NOTHING


def is_infinite(constant: ir.Value, size: ir.Value) -> bool:
    """Return whether a value is the constant infinity, and another value a magnitude that may equal it."""
    return constant_number(constant) == float("inf") and _is_nonnegative(size)


@functools.lru_cache(maxsize=64)  # walks call this for each operand of a node; lint clears the cache
def is_empty(node: ir.Node) -> bool:
    """Return whether a node's result has no elements: zero repeats, or an axis of length 0."""
    if any(value.shape is not None and 0 in value.shape.dims for value in node.outputs):
        return True
    if node.op_type in ("Tile", "Expand", "ConstantOfShape"):
        counts = constant_tensor(node.inputs[-1])
        if counts is None:  # A fed number may be zero.
            leaves = _above(node.inputs[-1]) if node.op_type == "Tile" else ()
            return any(leaf.is_graph_input() and leaf.dtype is ir.DataType.INT64 for leaf in leaves)
        return counts.size < _DEPTH and bool((counts.numpy() == 0).any())
    if not has_trait(node, Trait.ELEMENTWISE):
        return False
    tensors = map(constant_tensor, node.inputs)
    if any(tensor is not None and tensor.size == 0 for tensor in tensors):
        return True
    fills = (value.producer() for value in inputs_of(node))
    return any(fill is not None and fill.op_type == "ConstantOfShape" and is_empty(fill) for fill in fills)


def _converted(node: ir.Node, kinds: Kinds) -> Kinds:
    """Return the kinds that survive a conversion to another type."""
    to = _target(node)
    if to is None or to in _FLOATS:
        return kinds
    if not to.name.startswith(("FLOAT8E4", "FLOAT8E5")):
        return NOTHING
    if attribute(node, "saturate", 1):
        return kinds - {INF}
    return kinds if to is ir.DataType.FLOAT8E5M2 or NAN not in kinds else BOTH  # the others have only NaN


def _target(node: ir.Node) -> ir.DataType | None:
    """Return the type that a node converts to, None if unknown."""
    if node.op_type in _QUANTIZING:
        named = attribute(node, "output_dtype", 0)
        point = node.inputs[2] if len(node.inputs) > 2 else None
        return ir.DataType(named) if named else _dtype(point) or ir.DataType.UINT8
    if node.op_type == "Cast":
        return ir.DataType(attribute(node, "to", 0))
    like = node.inputs[1] if node.op_type == "CastLike" else None
    return node.outputs[0].dtype or _dtype(like)


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    tensor = constant_tensor(value)
    return tensor.dtype if tensor is not None else None if value is None else value.dtype


def _selected(node: ir.Node, value: ir.Value, kinds: Kinds, of_all: bool) -> Kinds:
    """Return the kinds that survive a selection: none if the number itself decides, and another replaces it."""
    condition, *branches = node.inputs
    if value is condition or condition is None:
        return kinds
    decided = constant_number(condition)
    if decided is not None:
        return kinds if branches[not decided] is value else NOTHING
    source = source_by_trait(value, Trait.VIEW)
    tests = [test for v in _above(condition) if (test := v.producer()) and has_trait(test, Trait.FINITENESS_TEST)]
    own = [test for test in tests if any(source_by_trait(v, Trait.VIEW) is source for v in inputs_of(test))]
    if own:
        return kinds.difference(*map(kinds_of_test, own))
    others = [branch for branch in branches if branch is not value]
    if any(source in _above(other) for other in others):
        return kinds
    return NOTHING if of_all or source in _above(condition) else kinds


def _above(value: ir.Value | None) -> set[ir.Value]:
    """Return a value, and the nearest values above it."""

    def operands(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        return [] if node is None or reads_shape(node) or len(found) > _DEPTH else list(inputs_of(node))

    found: set[ir.Value] = set()
    for each in reach([] if value is None else [value], operands):
        found.add(each)
    return found


def _is_nonnegative(value: ir.Value) -> bool:
    """Return whether a value is known to hold no negative numbers."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        value = source_by_trait(pending.pop(), Trait.RESHAPE | Trait.CAST | Trait.PERMUTE | Trait.REPEAT)
        node = value.producer()
        if value in seen or (node is not None and node.op_type in _NONNEGATIVE):
            continue
        seen.add(value)
        if node is None:
            number = constant_number(value)
            if number is None or number < 0:
                return False
        elif node.op_type in ("Mul", "Pow"):
            first, second = node.inputs[:2]
            if first is not second and not (node.op_type == "Pow" and constant_number(second) == 2):
                return False
        elif has_trait(node, Trait.REDUCTION):
            pending.append(inputs_of(node)[0])
        elif node.op_type in ("Max", "Concat", "Sum", "Add", "Identity"):
            pending += inputs_of(node)
        else:
            return False
    return True


def _seen_in_bodies(node: ir.Node, value: ir.Value) -> Kinds:
    """Return the kinds of a value that the bodies of a node notice, as a capture or an input."""
    seen = []
    for body in subgraphs(node):
        if any(use.node.graph is body for use in value.uses()) or any(value is output for output in body.outputs):
            seen.append(_seen_in(body, value))
        elif value in node.inputs and node.op_type in ("Loop", "Scan"):
            entering = body.inputs[node.inputs.index(value)] if node.inputs.index(value) < len(body.inputs) else None
            seen += [] if entering is None else [_seen_in(body, entering)]
    return BOTH.intersection(*seen)


def _seen_in(body: ir.Graph, value: ir.Value) -> Kinds:
    """Return the kinds of a value that show in the outputs of a body, or in its tests."""

    def readers(each: ir.Value) -> list[ir.Node]:
        return [node for node in dict.fromkeys(use.node for use in each.uses()) if node.graph is body]

    reached = set(reach([value], lambda each: [v for node in readers(each) for v in node.outputs]))
    results = [v for node in reversed(body) for v in node.outputs if v in reached and v is not value]
    known: dict[ir.Value, Kinds] = {}
    for each in (*results, value):  # readers first
        seen = BOTH if any(each is output for output in body.outputs) else NOTHING
        for node in readers(each):
            if has_trait(node, Trait.FINITENESS_TEST):
                seen |= kinds_of_test(node)
            elif is_comparison(node):
                seen |= BOTH
            else:
                seen |= survivors(node, each, NOTHING.union(*(known[output] for output in node.outputs)))
        known[each] = seen
    return known[value]
