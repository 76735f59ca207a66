"""Exported training steps with ground truth: a step's roles by its own script, and the registry of kinds.

Nothing here knows a framework: an array is a tensor of the exporter's framework, and `run` calls that framework.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Inputs:
    """A sample value for every input of a step, by role."""

    batch: Arrays = field(default_factory=dict)
    states: Arrays = field(default_factory=dict)
    """Weights, moments, counters, queues: what the step replaces."""
    hyperparameters: Arrays = field(default_factory=dict)
    constants: Arrays = field(default_factory=dict)
    """Inputs that the step reads and never replaces: weights of a step without an optimizer, frozen weights, masks."""

    def flat(self) -> Arrays:
        """Return all inputs by name: the order of the graph's inputs."""
        return self.batch | self.states | self.hyperparameters | self.constants


@dataclass(frozen=True)
class Outputs:
    """The outputs of a step, by role; `states` and `kept` by the name of the input that they replace."""

    losses: Arrays = field(default_factory=dict)
    metrics: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    states: Arrays = field(default_factory=dict)
    kept: Arrays = field(default_factory=dict)
    """Next values that advance on a skipped step, too."""

    def flat(self) -> Arrays:
        """Return all outputs by name: the order of the graph's outputs."""
        carried = {f"{name}_next": value for name, value in (self.states | self.kept).items()}
        return self.losses | self.metrics | self.gradients | carried


@dataclass(frozen=True)
class Truth:
    """The role of every input and output of an exported graph: each name stands in exactly one field."""

    kind: str
    exporter: str
    losses: list[str]
    metrics: list[str]
    gradients: list[str]
    states: dict[str, str]
    """The output that is the next value of an input, or of an initializer."""
    kept: list[str]
    """Outputs of `states` that advance on a skipped step, too."""
    batch: list[str]
    hyperparameters: list[str]
    constants: list[str]

    def renamed(self, names: dict[str, str]) -> "Truth":
        """Return the truth of the same graph with other names."""

        def rename(value: Any) -> Any:
            if isinstance(value, dict):
                return {rename(key): rename(item) for key, item in value.items()}
            return [names[item] for item in value] if isinstance(value, list) else names.get(value, value)

        roles = {key: rename(value) for key, value in asdict(self).items() if key not in ("kind", "exporter")}
        return replace(self, **roles)

    def check(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Raise a ValueError unless every input and output of the graph stands in exactly one field."""
        fields_of_outputs = [*self.losses, *self.metrics, *self.gradients, *self.states]
        fields_of_inputs = [*self.batch, *self.hyperparameters, *self.constants, *self.states.values()]
        if sorted(fields_of_outputs) != sorted(outputs) or set(self.kept) - set(self.states):
            raise ValueError(f"outputs {sorted(outputs)} differ from the truth {sorted(fields_of_outputs)}")
        missing = set(inputs) - set(fields_of_inputs)
        if missing or len(set(fields_of_inputs)) != len(fields_of_inputs):
            raise ValueError(f"inputs without one role: {sorted(missing)} ({sorted(fields_of_inputs)})")

    def to_json(self) -> str:
        """Return the truth as the text of a JSON file."""
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class Style:
    """The form in which a step is exported."""

    names: str = "plain"
    """`plain`, the names of the script; `exporter`, the exporter's own; `scrambled`, meaningless ones; `numbered`, in_0
    and out_0; or a pattern of the next values' names, such as `new_{}`."""
    order: str = "plain"
    """Order of inputs and outputs: `plain`; `reversed`; `shuffled`, both on their own."""
    states: str = "inputs"
    """States are `inputs`; `initializers`; or `overridable`, both."""
    embedded_constants: bool = False
    """The constants of the step are initializers, not inputs."""
    shapes: str = "all"
    """`all`; `interface`, without value_info; `inputs`, without the outputs' shapes as well."""
    optimize: bool = True
    opset: int = 20
    runtime: str = ""
    """Rewritten by ONNX Runtime's own optimizer: `basic` or `extended`."""
    simplified: bool = False
    """Rewritten by onnxsim."""
    dynamic: bool = False
    """Keep the first dimension of the batch dynamic."""

    def describe(self) -> str:
        """Return what differs from the plain style."""
        plain = asdict(Style())
        return ", ".join(f"{key}={value}" for key, value in asdict(self).items() if value != plain[key])


PLAIN = Style()
STYLES = {
    "exporter-names": Style(names="exporter"),
    "shuffled": Style(order="shuffled"),
    "initializers": Style(states="initializers"),
    "unoptimized": Style(optimize=False),
    "scrambled": Style(names="scrambled"),
    "overridable": Style(states="overridable"),
    "bare": Style(shapes="inputs"),
    "dynamic": Style(dynamic=True),
    "scrambled-bare": Style(names="scrambled", order="shuffled", shapes="interface"),
    "opset-18": Style(opset=18, order="reversed"),
    "scrambled-initializers": Style(names="scrambled", states="initializers", order="shuffled"),
    "unoptimized-shuffled": Style(names="exporter", order="shuffled", optimize=False),
    "opset-21": Style(opset=21, names="exporter"),
}
"""Styles that kinds with many steps take in turn."""


@dataclass(frozen=True)
class Step:
    """A training step: a pure function from named arrays to outputs by role."""

    variant: str
    inputs: Inputs
    run: Callable[[Arrays], Outputs]
    style: Style = PLAIN
    kind: str = ""
    exporter: str = ""
    warm: int = 2
    """Steps that are run before the sample is taken, so that moments and counters hold realistic values."""
    deterministic: bool = True
    """The graph draws no random numbers: a runtime has to compute what the framework computes."""
    tracing: str = ""
    """The mode of tracing, for steps that the exporter cannot trace in its usual mode."""

    @property
    def name(self) -> str:
        """The name of the step's files."""
        return f"{self.kind}.{self.variant}"

    def truth(self, outputs: Outputs) -> Truth:
        """Return the truth under the script's own names, given any outputs of the step."""
        carried = outputs.states | outputs.kept
        if set(carried) != set(self.inputs.states):
            raise ValueError(f"{self.name}: carried {sorted(self.inputs.states)}, replaced {sorted(carried)}")
        return Truth(
            kind=self.kind,
            exporter=", ".join(filter(None, [self.exporter, self.style.describe()])),
            losses=list(outputs.losses),
            metrics=list(outputs.metrics),
            gradients=list(outputs.gradients),
            states={f"{name}_next": name for name in carried},
            kept=[f"{name}_next" for name in outputs.kept],
            batch=list(self.inputs.batch),
            hyperparameters=list(self.inputs.hyperparameters),
            constants=list(self.inputs.constants),
        )


Maker = Callable[[], Iterable[Step]]
KINDS: dict[str, tuple[str, Maker]] = {}


def kind(name: str, exporter: str = "pytorch") -> Callable[[Maker], Maker]:
    """Register the steps of one kind under its name."""

    def register(maker: Maker) -> Maker:
        if name in KINDS:
            raise ValueError(f"two kinds are named {name}")
        KINDS[name] = exporter, maker
        return maker

    return register


def is_aside(name: str) -> bool:
    """Report whether a kind is set aside: one kind of five, drawn by a hash of its name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 5 == 0


def steps(patterns: Iterable[str] = ("*",), prepare: Callable[[str], None] = lambda _: None) -> Iterator[Step]:
    """Yield the steps whose kind or name matches, kind by kind; `prepare` is called with each kind's name."""
    for name, (exporter, maker) in KINDS.items():
        wanted = [pattern if "." in pattern else f"{pattern}.*" for pattern in patterns]
        if not any(fnmatch(name, pattern.split(".")[0]) for pattern in wanted):
            continue
        prepare(name)
        seen = set()
        for step in maker():
            step = replace(step, kind=name, exporter=exporter)
            if step.name in seen:
                raise ValueError(f"two steps are named {step.name}")
            seen.add(step.name)
            if any(fnmatch(step.name, pattern) for pattern in wanted):
                yield step
