"""Private copies of graphs, with access to inner values, and their runs on ONNX Runtime."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.errors import SessionError, VerifyError, one_line
from graphscale.files.tensor_files import Arrays
from graphscale.graph.builder import Editor
from graphscale.graph.inference import dtypes_by_name
from graphscale.graph.releases import advise_missing, too_new
from graphscale.graph.types import dtype_of
from graphscale.graph.values import own_dtype, uses_of, values_by_name
from graphscale.graph.walks import ancestors
from graphscale.operators import MICROSOFT, Trait, has_trait
from graphscale.passes.nodes.finite import all_finite
from graphscale.session.interface import to_ort_value
from graphscale.session.loading import choose_device, make_quiet_options
from graphscale.targets import CPU_PROVIDER, default_opset, get_target

__all__ = ["Copy", "Results", "Runner", "extract", "find_unseeded", "give_seed"]

_LARGE = 2**30  # bytes of a model that is passed as a file, not in memory
PASS = "verify"
NO_SEEDS: Mapping[str, int] = {}


def find_unseeded(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Find random nodes without a seed: ONNX Runtime seeds them by their position in the graph."""
    return (node for node in nodes if has_trait(node, Trait.RANDOM) and "seed" not in node.attributes)


def give_seed(node: ir.Node | None, seed: int) -> None:
    """Give a random operator a seed."""
    assert node is not None
    whole = "Dropout" in node.op_type
    node.attributes["seed"] = ir.AttrInt64("seed", seed) if whole else ir.AttrFloat32("seed", float(seed))


class Results(NamedTuple):
    """The results of a run.

    Attributes:
        outputs: every output.
        left: the feeds after the run: in-place operators write into their memory.
    """

    outputs: Arrays
    left: Arrays


class Copy:
    """A copy of a model, for changes.

    Args:
        model: the model.
        fed: the names of initializers that become inputs; other names are passed over.
        seeds: seeds for random operators: `{name of the first output: seed}`.

    Attributes:
        model: the copy.
        values: its original values by name.
    """

    def __init__(self, model: ir.Model, fed: Iterable[str] = (), seeds: Mapping[str, int] = NO_SEEDS) -> None:
        self.model = model.clone()
        self.graph = self.model.graph
        self.values = values_by_name(self.graph)
        self._editor = Editor(self.graph)
        known = (value for name in fed if (value := self.values.get(name)) is not None)
        inputs = (value for value in known if value.is_initializer() and not value.is_graph_input())
        self.graph.inputs.extend(dict.fromkeys(inputs))
        for name, seed in seeds.items():
            give_seed(self.values[name].producer(), seed)

    @functools.cached_property
    def _dtypes(self) -> Mapping[str, ir.DataType]:
        return dtypes_by_name(self.model)

    def show(self, names: Iterable[str]) -> None:
        """Add values to the outputs."""
        present = {value.name for value in self.graph.outputs}
        for name in dict.fromkeys(names):
            if name not in present and name in self.values:
                value = self.values[name]
                value.dtype = own_dtype(value) or self._dtypes.get(name) or dtype_of(value)
                self.graph.outputs.append(value)

    def cut(self, name: str) -> tuple[str, Any]:
        """Let all nodes that read a value read a new input instead; return the input's name and dtype."""
        value = self.values[name]
        given = ir.val(self._editor.unique(f"{name}.given"), dtype_of(value))
        for node, index in uses_of(value):
            node.replace_input_with(index, given)
        self.graph.inputs.append(given)
        return given.name or "", dtype_of(value).numpy()

    def spell_out_finite_checks(self) -> int:
        """Replace `IsAllFinite`, which has no kernel for the CPU, by standard operators; return the number replaced."""
        nodes = [n for n in self.graph if (n.domain, n.op_type) == (MICROSOFT, "IsAllFinite")]
        for node in nodes:
            build = self._editor.builder(PASS, at=("before", node))
            finite = all_finite(build, [value for value in node.inputs if value is not None], get_target("onnx"))
            self._editor.replace_result(node.outputs[0], finite, "kernel")
            self.values[finite.name or ""] = finite
            self.graph.remove(node, safe=True)
        return len(nodes)


def extract(model: ir.Model, outputs: Sequence[ir.Value], given: Sequence[ir.Value] = ()) -> ir.Model:
    """Return a copy of the part of a model that computes some values, with others as inputs."""
    above = ancestors(outputs, stop=lambda value: value in given)
    inputs = [value for value in model.graph.inputs if value in above]
    graph = ir.convenience.extract(model.graph, [*inputs, *given], outputs)
    return ir.Model(graph, ir_version=model.ir_version, functions=tuple(model.functions.values()))


class Runner:
    """A session of ONNX Runtime on a model, without ONNX Runtime's own optimizations.

    Its optimizations move constant factors through matrix products, depending on the surrounding nodes. This changes
    the rounding, so that equal computations would not have equal bits.

    Args:
        model: the model.
        providers: execution providers; None for the CPU.
        what: name of the model in messages.

    Attributes:
        fresh: True for a new session in each run, so that random numbers start from their seeds.
        runs: number of runs.
        required: the inputs that must be fed.
        written: the inputs that the graph writes in place.

    Raises:
        VerifyError: ONNX Runtime cannot load the model.
    """

    def __init__(self, model: ir.Model, providers: Sequence[Any] | None, what: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="graphscale-")
        self._source = _source(model, Path(self._folder.name))
        self._providers = list(providers or [CPU_PROVIDER])
        try:
            self._cuda = choose_device(self._providers).name != "cpu"
        except SessionError as error:
            raise VerifyError(str(error)) from error
        self._what, self._versions = what, (default_opset(model), model.ir_version)
        self.fresh, self.runs = False, 0
        self._session: Any = self._open()
        self.required = {value.name for value in self._session.get_inputs()}
        self.inputs = self.required | {value.name for value in self._session.get_overridable_initializers()}
        self.outputs = tuple(value.name for value in self._session.get_outputs())
        self.written = {n.inputs[0].name for n in model.graph if n.domain == MICROSOFT and n.inputs and n.inputs[0]}

    def run(self, feeds: Mapping[str, Any]) -> Results:
        """Run once, on copies of the model's feeds.

        Raises:
            VerifyError: ONNX Runtime fails.
        """
        if self.fresh and self.runs:
            self._session = self._open()
        self.runs += 1
        copies = {name: np.array(value) for name, value in feeds.items() if name in self.inputs}
        is_bound = self._cuda or any(array.dtype == ml_dtypes.bfloat16 for array in copies.values())
        try:
            values, left = self._bound(copies) if is_bound else (self._session.run(list(self.outputs), copies), copies)
        except Exception as error:  # ORT's exceptions share no public base class
            raise VerifyError(f"ONNX Runtime cannot run {self._what}: {one_line(error)}") from error
        # Outputs may share memory with operands of in-place computations.
        return Results(dict(zip(self.outputs, map(np.array, values), strict=True)), left)

    def close(self) -> None:
        """Free the session, and its files."""
        self._session = None
        self._folder.cleanup()

    def _bound(self, feeds: Arrays) -> tuple[Sequence[Any], Arrays]:
        """Run with bindings: a GPU writes a feed in place only in its own memory."""
        import onnxruntime as ort

        device = "cuda" if self._cuda else "cpu"
        held = {}
        for name, array in feeds.items():
            on_device = self._cuda and name in self.written
            held[name] = ort.OrtValue.ortvalue_from_numpy(array, device, 0) if on_device else to_ort_value(name, array)
        binding = self._session.io_binding()
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        left = {name: np.array(held[name].numpy()) if name in self.written else feeds[name] for name in feeds}
        return binding.copy_outputs_to_cpu(), left

    def _open(self) -> Any:
        import onnxruntime as ort

        options = make_quiet_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        # Products with a constant would be summed in another order than those with a value.
        options.add_session_config_entry("session.disable_prepacking", "1")
        source = str(self._source) if isinstance(self._source, Path) else self._source
        try:
            return ort.InferenceSession(source, options, providers=self._providers, enable_fallback=0)
        except Exception as error:  # ORT's exceptions share no public base class
            advice = advise_missing(str(error))
            limits = too_new(ort.__version__, *self._versions)
            raise VerifyError(
                f"ONNX Runtime {ort.__version__} cannot load {self._what}{f' ({limits})' if limits else ''}: "
                f"{one_line(error)}{advice and f'{advice}; or prove only: --runs 0'}"
            ) from error


def _source(model: ir.Model, folder: Path) -> Path | bytes:
    """Return the model as bytes, or as a new file for external or large weights."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    # ONNX Runtime maps the files that a model without a path names in the present folder.
    if any(map(_lies_elsewhere, external)) or sum(t.nbytes for t in tensors if t not in external) > _LARGE:
        path = folder / "model.onnx"
        ir.save(model, path, format="protobuf", external_data="weights")
        return path
    data: bytes = ir.to_proto(model).SerializeToString()
    return data


def _lies_elsewhere(tensor: ir.ExternalTensor) -> bool:
    return os.path.realpath(tensor.base_dir) != os.getcwd()
