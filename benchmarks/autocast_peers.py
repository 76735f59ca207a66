"""gs.autocast against the float16 converters of others: casts, results that run, time.

    pip install onnxconverter-common==1.16.0    (beside '.[test]', with onnxruntime-training 1.19.2)
    python benchmarks/autocast_peers.py [casts] [models] [time] [--nodes 1000 3000 10000 100000] [--repeats 5]

The peers, each with float32 inputs and outputs, the types of a training step:

    common      onnxconverter_common.float16.convert_float_to_float16
    ort         onnxruntime.transformers.float16.convert_float_to_float16
    auto        onnxconverter_common.auto_mixed_precision.auto_convert_mixed_precision, within the tolerance of `models`

casts   Cast nodes that each tool adds to the forward part of the graphs of models/: the nodes that the loss depends on.
        graphscale converts the whole step, of which the forward part is counted; the others get the forward part alone,
        once with their defaults, once with graphscale's deny list as their `op_block_list`, so that the same operators
        stay float32 (by default they put Softmax, the loss and all statistics into float16). Weights are inputs: in
        training they are float32 masters. An x: ONNX Runtime does not load the result.
models  The whole training steps: does each tool's result load and run on ONNX Runtime's CPU provider, and are loss,
gradients and next weights those of the original, within 2 % of the largest element of each output? The
        same for graphscale, also emulated, with a dynamic loss scale: the CPU provider computes in float32 between
        casts, and removes pairs of casts, so that only emulation shows the rounding of float16. "No masters": a next
        weight or moment is computed in float16. Constants that float16 does not hold are listed.
time    CPU time on the training step that pass_cost.py generates, ModelProto in, ModelProto out, and of the pass
        `Autocast` alone, which changes an onnx_ir model in place, as the peers change a ModelProto in place. Each tool
        has processes of its own, since memory of one slows the next down; those of graphscale run before and after each
        peer's, since machines get slower and faster by the minute. Medians of all repeats; a job that takes more than
        30 s runs once. The peer that grows with the square is left out above 10,000 nodes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from converters import (
    CRASH,
    NAMES,
    TOLERANCE,
    Worker,
    casts,
    convert,
    copy_of,
    installed_peers,
    loads,
    quiet,
    read,
    run,
    short,
    worst,
)
from pass_cost import NODES_PER_LAYER, training_graph

import graphscale as gs
from graphscale.operators import Colour
from graphscale.passes import Autocast
from graphscale.passes.casting.settings import default_rules

DENIED = sorted({op for (_, op), rule in default_rules().items() if rule.colour is Colour.DENY})
SLOW, LARGEST_OF_SQUARE = 30.0, 10_000
OURS, PASS = "graphscale", "the pass"


def table(*columns: str) -> None:
    """The head of a table whose columns but the first are numbers."""
    print("| " + " | ".join(columns) + " |\n|---|" + "---:|" * (len(columns) - 1))


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def forward(model: onnx.ModelProto, loss: str) -> onnx.ModelProto:
    """Return the part that the loss depends on, with all weights as inputs."""
    whole = ir.from_proto(model)
    for weight in [v for name, v in whole.graph.initializers.items() if name.endswith((".weight", ".bias"))]:
        if not weight.is_graph_input():
            whole.graph.inputs.append(weight)
        whole.graph.initializers.pop(weight.name)
        weight.const_value = None
    graph = ir.convenience.extract(whole.graph, list(whole.graph.inputs), [loss])
    needed = {value for node in graph for value in node.inputs}
    for value in [v for v in graph.inputs if v not in needed]:
        graph.inputs.remove(value)
    return ir.to_proto(ir.Model(graph, ir_version=whole.ir_version))


def added(column: str, name: str) -> tuple[int, bool] | str:
    """Count the casts that a tool adds to a forward part, and return whether it loads, or why there is no result."""
    model, feeds = read(name)
    feeds |= {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    loss = gs.inspect(model).loss
    before = forward(model, loss)
    feeds = {value.name: feeds[value.name] for value in before.graph.input}
    tool, _, same = column.partition(", ")
    with quiet():
        try:
            if tool == "graphscale":
                after = forward(convert(tool, model, feeds), loss)
            else:
                after = convert(tool, before, feeds, **({"op_block_list": DENIED} if same else {}))
        except Exception as error:  # whatever a peer raises is its result
            return short(error)
        return casts(after) - casts(before), loads(after)


def count_casts(peers: Sequence[str]) -> None:
    columns = [f"{peer}{how}" for peer in peers for how in ("", ", same list") if peer != "auto" or not how]
    table("forward part of", "graphscale", *columns)
    totals = {column: Counter[str]() for column in columns}
    worker = Worker()
    for name in NAMES:
        (ours, sound), cells = worker(added, "graphscale", name), []
        assert sound, name
        for column, total in totals.items():
            result = worker(added, column, name)
            if not isinstance(result, tuple):
                total["fails"] += 1
                cells.append("fails" if result else CRASH[0])
                continue
            theirs, sound = result
            cells.append(f"{theirs}" if sound else f"{theirs} x")
            total.update({"ours": ours, "theirs": theirs, "x": not sound})
            total["fewer" if ours < theirs else "as many" if ours == theirs else "more"] += 1
            total["more, and loads"] += ours > theirs and sound
        row(name, ours, *cells)
    worker.close()
    print()
    keys = ("ours", "theirs", "fewer", "as many", "more", "more, and loads", "x", "fails")
    table(f"graphscale, on {len(NAMES)} graphs, against", *keys)
    for column, total in totals.items():
        row(column, *(total[key] for key in keys))


def verdict(tool: str, name: str) -> tuple[str, str]:
    """Judge a tool's result for a training step of models/: a word, and a remark."""
    model, feeds = read(name)
    wanted = run(model, feeds)
    with quiet():
        try:
            converted = convert(tool, model, feeds)
        except Exception as error:  # whatever a peer raises is its result
            return "not converted", short(error)
        try:
            found = run(converted, feeds)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            return "does not load", short(error)
    error = worst(wanted, found)
    note = ", no masters" if without_masters(model, converted) else ""
    return "equal" if error <= TOLERANCE else "differs", f"{error:.1e}{note}"


def without_masters(model: onnx.ModelProto, converted: onnx.ModelProto) -> bool:
    """Return whether some next weight or moment is computed in float16, and cast at the end."""

    def cast(graph: onnx.GraphProto) -> set[str]:
        return {name for node in graph.node if node.op_type == "Cast" for name in node.output}

    outputs = {state.output for state in gs.inspect(model).state}
    return bool(outputs & cast(converted.graph) - cast(model.graph))


def try_models(peers: Sequence[str]) -> None:
    columns = ["graphscale", "graphscale, emulated and scaled", *peers]
    table("training step", *columns)
    counts = {tool: Counter[str]() for tool in columns}
    messages = {tool: Counter[str]() for tool in columns}
    worker = Worker()
    for name in NAMES:
        cells = []
        for tool in columns:
            word, text = worker(verdict, tool, name) or CRASH
            ran = word in ("equal", "differs")
            counts[tool][word] += 1
            counts[tool]["no masters"] += text.endswith("no masters")
            cells.append(f"{word} ({text})" if ran else word)
            messages[tool].update([] if ran else [f"{word}: {text}"])
        row(name, *cells)
    worker.close()
    print()
    words = ("equal", "differs", "no masters", "does not load", "crashes", "not converted")
    table(f"of {len(NAMES)} training steps", *words)
    for tool, found in counts.items():
        row(tool, *(found[word] for word in words))
    print()
    for tool, texts in messages.items():
        for text, count in texts.most_common(5):
            print(f"- {tool}, {count} times {text}")
    show_masks([peer for peer in peers if peer != "auto"])


def show_masks(peers: Sequence[str]) -> None:
    """Print the fate of the constants that float16 does not hold."""
    model, feeds = read("pytorch/attention_tied")
    lowest = copy_of(model)  # the same mask as other exporters write it
    for tensor in tensors_of(lowest):
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and np.isneginf(array).any():
            finite = np.maximum(array, np.finfo(np.float32).min)
            tensor.CopyFrom(onnx.numpy_helper.from_array(finite, tensor.name))
    for title, graph in (("-inf", model), ("the lowest float32", lowest)):
        print(f"\nA causal mask of {title}; the constants of pytorch/attention_tied beyond float16:")
        for tool in ("the original", "graphscale", *peers):
            print(f"- {tool}: {beyond_float16(graph if tool == 'the original' else convert(tool, graph, feeds))}")


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from model.graph.initializer
    yield from (a.t for node in model.graph.node for a in node.attribute if a.HasField("t"))


def beyond_float16(model: onnx.ModelProto) -> list[float]:
    arrays = map(onnx.numpy_helper.to_array, tensors_of(model))
    return sorted({float(x) for a in arrays if a.dtype.kind == "f" for x in a[np.abs(a) > 65504]})


def seconds(job: Callable[[], Any], repeats: int, results: list[Any]) -> list[float]:
    """The CPU times of a job, which runs only once where it is slow; only its last result is left."""
    times: list[float] = []
    while len(times) < repeats and (not times or times[0] < SLOW):
        results.clear()
        gc.collect()
        begin = time.process_time()
        job()
        times.append(time.process_time() - begin)
    return times


def time_alone(tool: str, size: int, repeats: int) -> None:
    """Print, as JSON, the CPU times of a tool, and how many casts it adds."""
    graph = training_graph(max(1, round(size / NODES_PER_LAYER)))
    model = ir.to_proto(graph)
    last: list[Any] = []
    if tool == PASS:
        copies = [graph.clone() for _ in range(repeats)]
        times = seconds(lambda: last.append(Autocast()(copies.pop()).model), repeats, last)
    else:
        times = seconds(lambda: last.append(convert(tool, model, {})), repeats, last)
    result = ir.to_proto(last[0]) if tool == PASS else last[0]
    print(json.dumps({"nodes": len(model.graph.node), "times": times, "casts": casts(result) - casts(model)}))


def measure_time(peers: Sequence[str], size: int, repeats: int) -> None:
    """Print the row of a size: each tool in new processes, graphscale's before and after each peer's."""
    found: dict[str, dict[str, Any]] = {}

    def measure(*tools: str) -> None:
        for tool in tools:
            command = [sys.executable, __file__, "--alone", tool, "--nodes", str(size), "--repeats", str(repeats)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            answer = json.loads(done.stdout.splitlines()[-1])
            answer["times"] += found[tool]["times"] if tool in found else []
            found[tool] = answer

    measure(OURS, PASS)
    for peer in peers:
        if peer != "common" or size <= LARGEST_OF_SQUARE:
            measure(peer, OURS, PASS)
    middle = {tool: statistics.median(answer["times"]) for tool, answer in found.items()}
    cells = [f"{found[OURS]['nodes']:,}", f"{middle[OURS]:.2f} s", f"{middle[PASS]:.2f} s", found[OURS]["casts"]]
    for peer in peers:
        if peer in found:
            ratios = [f"{middle[peer] / middle[own]:.1f}" for own in (OURS, PASS)]
            cells += [f"{middle[peer]:.2f} s", *ratios, found[peer]["casts"]]
        else:
            cells += ["left out", "", "", ""]
    row(*cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="casts, models, time; default: all")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 3_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", metavar="TOOL", help="print the times of this tool alone, as JSON")
    options = parser.parse_args()
    if options.alone is not None:
        with quiet():
            time_alone(options.alone, options.nodes[0], options.repeats)
        return
    if unknown := set(options.parts) - {"casts", "models", "time"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are casts, models, time")
    with quiet():
        peers = installed_peers()
        if not options.parts or "casts" in options.parts:
            count_casts(peers)
        if not options.parts or "models" in options.parts:
            try_models(peers)
        if not options.parts or "time" in options.parts:
            peers = [peer for peer in peers if peer != "auto"]  # it searches, by running the graph
            columns = (name for peer in peers for name in (peer, "ratio", "ratio to the pass", "casts"))
            table("nodes", "graphscale", "the pass", "casts", *columns)
            for size in options.nodes:
                measure_time(peers, size, options.repeats)


if __name__ == "__main__":
    main()
