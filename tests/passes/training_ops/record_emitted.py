"""Record the operators that onnxruntime-training emits: python -m tests.passes.training_ops.record_emitted [FOLDER]

`emitted/operators.json` has each operator that stock ONNX Runtime lacks, by the forward operators that it is emitted
for, `emitted/gradients.zip` the gradient graphs that have such operators.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import multiprocessing
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx.parser
from onnx import TensorProto, helper

from graphscale.operators import MICROSOFT
from graphscale.operators.stock_kernels import STOCK_OPERATORS
from graphscale.passes.lower_training_ops import FORMULAS
from graphscale.passes.lower_training_ops.without_form import WITHOUT_FORM
from tests.passes.training_ops.emitted_operators import GRAPHS, OPERATORS, Emitted, load_forward_operators
from tests.passes.training_ops.forward.forward_patterns import PATTERNS, Pattern
from tests.passes.training_ops.forward.node import FORWARD
from tests.passes.training_ops.gradient_graphs import LOSS, forward_model, gradient_graph

_FORKED = multiprocessing.get_context("fork")
# Other errors say what the builder of an operator misses. It passes no gradient through the second kind at all.
_NOT_REGISTERED = ("has not been registered", "Cannot compute the partial derivative", "has no data attributes")


def differentiable() -> list[str]:
    """Return the operators that the gradient builder is registered for: it looks at names alone."""
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    names |= {name for _, name in {*FORMULAS, *WITHOUT_FORM, *STOCK_OPERATORS}}
    return [name for name in sorted(names | {"ATen", "ExternalGradient"}) if _is_registered(name)]


def _is_registered(name: str) -> bool:
    operands, domains = ["x0", "x1", "x2"], [helper.make_opsetid("", 17)]
    function = helper.make_function("probe", name, operands, ["y"], [helper.make_node("Sum", operands, ["y"])], domains)
    nodes = [helper.make_node(name, operands, ["y0"], domain="probe"), helper.make_node("ReduceSum", ["y0"], [LOSS])]
    inputs = [helper.make_tensor_value_info(operand, TensorProto.FLOAT, [2, 2]) for operand in operands]
    graph = helper.make_graph(nodes, "probe", inputs, [helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, [1, 1])])
    domains += [helper.make_opsetid("probe", 1), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=domains, ir_version=8)
    try:
        gradient_graph(model, {"x2"}, optimized=False)
    except Exception as error:  # the builder's exceptions share no public base class
        return not any(text in str(error) for text in _NOT_REGISTERED)
    return True


def pattern_model(pattern: Pattern) -> onnx.ModelProto:
    """Build the model of a pattern, with the sum of the sines of its result as the loss."""
    opset, inputs, nodes, constants = pattern
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}, "{MICROSOFT}" : 1]>
    pattern ({inputs}) => (float {LOSS}) <{constants}> {{
        {nodes} sine = Sin(y) {LOSS} = ReduceSum<keepdims = 0>(sine)
    }}""")


def foreign(model: onnx.ModelProto) -> list[str]:
    """Return the operators of a model that stock ONNX Runtime lacks."""
    nodes = {(node.domain, node.op_type) for node in model.graph.node}
    return sorted(name for domain, name in nodes - STOCK_OPERATORS if domain or not onnx.defs.has(name))


def onnxblock_operators() -> list[str]:
    """Return the operators that the blocks of `generate_artifacts` add: losses, accumulation, clipping, optimizers."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    found = set()
    for path in (Path(spec.origin).parent / "training" / "onnxblock").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            # The operator is an argument of `make_node`, or of a block that calls it for others.
            for operand in (argument for argument in call.args if isinstance(argument, ast.Constant)):
                if isinstance(operand.value, str) and operand.value.isidentifier():
                    found.add(operand.value)
    names = {name for _, name in {*FORMULAS, *WITHOUT_FORM}}
    unknown = {name for name in found if name[0].isupper() and not onnx.defs.has(name)} - names - {"LabelEncoder"}
    assert not unknown, f"new operators, or other words in calls: {sorted(unknown)}"
    return sorted(found & names)


def _build_apart(model: onnx.ModelProto, weights: set[str], optimized: bool) -> onnx.ModelProto | None:
    """Build a gradient graph in a process of its own; return None if the builder gives up, or ends the process."""
    results, sender = _FORKED.Pipe(duplex=False)

    def build() -> None:
        sender.send_bytes(gradient_graph(model, weights, optimized=optimized).SerializeToString())

    process = _FORKED.Process(target=build)
    process.start()
    sender.close()
    try:
        return onnx.load_from_string(results.recv_bytes())
    except EOFError:
        return None
    finally:
        process.join()


def collect() -> tuple[Emitted, dict[str, onnx.ModelProto]]:
    """Build all gradient graphs; return what they have in them, and those of `FORWARD` that need a training build."""
    load_forward_operators()
    models = {name: (forward_model(case), {f"x{i}" for i in case.varied}) for name, case in FORWARD.items()}
    for name, pattern in PATTERNS.items():
        model = pattern_model(pattern)
        weights = {each.name for each in model.graph.input if each.type.tensor_type.elem_type == TensorProto.FLOAT}
        models[name] = (model, weights)
    emitted, graphs = defaultdict(set), {}
    undone = []
    for name, (model, weights) in models.items():
        source = FORWARD[name].op_type if name in FORWARD else name
        built = {optimized: _build_apart(model, weights, optimized) for optimized in (False, True)}
        found = {optimized: graph for optimized, graph in built.items() if graph is not None}
        plain = foreign(found[False]) if False in found else []
        others = [op_type for op_type in foreign(found[True]) if op_type not in plain] if True in found else []
        for op_type in plain:
            # A pattern is there for what no single operator has.
            if name in FORWARD or not emitted[op_type]:
                emitted[op_type].add(source)
        for op_type in others:
            emitted[op_type].add(f"{source} (generate_artifacts)")
        if name in FORWARD and True in found and foreign(found[True]):
            graphs[name] = found[True]
        if not found:
            undone.append(name)
    for op_type in onnxblock_operators():
        emitted[op_type].add("generate_artifacts")
    sources = {op_type: sorted(_shortened(names)) for op_type, names in sorted(emitted.items())}
    return Emitted(differentiable(), sources, sorted(undone)), graphs


def _shortened(sources: Iterable[str]) -> set[str]:
    """Leave out the mark of sources that are there without it."""
    names = set(sources)
    return {name for name in names if name.removesuffix(" (generate_artifacts)") not in names - {name}}


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else OPERATORS.parent
    emitted, graphs = collect()
    (folder / OPERATORS.name).write_text(json.dumps(emitted._asdict(), indent=1) + "\n")
    with zipfile.ZipFile(folder / GRAPHS.name, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, model in sorted(graphs.items()):
            archive.writestr(zipfile.ZipInfo(name), model.SerializeToString(deterministic=True), zipfile.ZIP_DEFLATED)
    print(f"{len(emitted.sources)} operators, {len(graphs)} graphs")


if __name__ == "__main__":
    main()
