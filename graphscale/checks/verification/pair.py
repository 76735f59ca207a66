"""An original graph, and its supposed scaled graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import onnx
import onnx_ir as ir

from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.report_reading import read_report
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.updates import same_type
from graphscale.checks.pairing import pair_models
from graphscale.checks.patterns import input_at, is_cast_of
from graphscale.checks.translation.validation import Translation, find_scaled_loss, find_widened, validate_translation
from graphscale.checks.verification.rounding_noise import find_small_types
from graphscale.errors import AlreadyScaledError, ModelFileError, VerifyError, one_line
from graphscale.graph.diagnosis import find_rejection
from graphscale.graph.inference import infer_types
from graphscale.graph.order import check_order
from graphscale.graph.original import outline
from graphscale.graph.stamp import Stamp, has_lost_stamp, is_scaled
from graphscale.graph.values import is_source, uses_of, value_label, values_by_name
from graphscale.lowering.lower_model import is_lowered, plain_form
from graphscale.operators import Trait, nodes_with, written_inputs
from graphscale.passes import CheckFinite, LowerTrainingOps, replace_training_ops
from graphscale.passes.lower_precision import find_roundable
from graphscale.passes.nodes.update_rule import DOMAIN, FUNCTION
from graphscale.passes.preparation import prepare
from graphscale.pipeline import Model, open_copy, open_copy_with_proto
from graphscale.policy.names import RESULTS, ScaledValue
from graphscale.process.summary import few
from graphscale.step.scaled_step import read
from graphscale.step.training_step import Step
from graphscale.step.understanding import understand
from graphscale.step.unstamped_step import read_unstamped
from graphscale.targets import get_target

__all__ = ["Pair", "check_names", "open_pair", "open_scaled"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both graphs, and the analysis of the original.

    Attributes:
        original: the original, without nodes that hide the gradient path, in the mixed precision of the scaled one.
        step: the step of the scaled model.
        analysis: the analysis of the original.
        states: `{input: output}` of the original's carried state, None for inputs written in place.
        kept: the states that advance on skipped steps, too.
        nodes: `{node of the original: the same node in the scaled graph}`.
        translation: the comparison with the original scaled again; None for a step that somebody else scaled.
        small: the types below float32 in the original, in the mixed precision of the scaled one.
        notes: facts for the user.
        dtype: the type of the mixed precision that scaling put the original into; None without it.
        lowered: a lowered file with the expected nodes; then `step` is that of its plain form, with the same initial
            values.
        wide: the original before mixed precision; None without it.
        roundable: the names of its values that mixed precision may compute in a small type.
    """

    original: ir.Model
    step: Step
    analysis: Step
    states: Mapping[str, str | None]
    kept: frozenset[str]
    nodes: Mapping[ir.Node, ir.Node]
    translation: Translation | None
    small: frozenset[ir.DataType]
    notes: tuple[str, ...]
    dtype: str | None = None
    lowered: ir.Model | None = None
    wide: ir.Model | None = None
    roundable: frozenset[str] = frozenset()

    @property
    def proved(self) -> bool:
        """True if all nodes of the scaled graph are the expected ones."""
        return self.translation is not None and not self.translation.graph

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """The names of the states written in place."""
        carried = (each.input for each in self.step.carried if each.in_place)
        buffers = (node.inputs[0] for node in self.step.accumulators)
        return frozenset(value.name or "" for value in (*carried, *buffers) if value is not None)

    @functools.cached_property
    def following(self) -> dict[str, str | None]:
        """`{state: output}` of all carried state, None for state written in place."""
        names = [value.name or "" for value in self.step.added]
        pairs = {**{name: self.step.stamp.state.get(name) for name in names}, **self.states}
        return {name: None if name in self.written else output for name, output in pairs.items()}

    @functools.cached_property
    def scaled_loss(self) -> ir.Value | None:
        """The output with the loss times the scale, if any."""
        return find_scaled_loss(self.step.graph, self.analysis.graph)

    @functools.cached_property
    def values(self) -> Mapping[str, ir.Value]:
        """The values of the scaled graph by name."""
        return values_by_name(self.step.graph)

    def counterpart(self, value: ir.Value) -> ir.Value | None:
        """Return a value's counterpart in the scaled graph: the result of the same node, or the same input."""
        node = value.producer()
        if node is None:
            return self.values.get(value.name or "")
        other = self.nodes.get(node)
        index = value.index() or 0
        return None if other is None or index >= len(other.outputs) else other.outputs[index]

    def find_tested(self) -> list[str]:
        """Find the operands of the finite check in the original, such as sums of gradients and weight decay."""
        nodes = filter(CheckFinite.inserted, self.step.graph if self.proved else ())
        read = {value for node in nodes for value in node.inputs}
        values = (value for node in self.nodes for value in node.outputs)
        return [value.name or "" for value in values if self.counterpart(value) in read]

    def find_gradients(self) -> tuple[dict[str, str], dict[str, str]]:
        """Find the gradients in the scaled graph, with the scale and without, by their names in the original."""
        raw: dict[str, str] = {}
        quotients: dict[str, str] = {}
        for gradient in self.analysis.gradients:
            value = self.counterpart(gradient)
            if value is not None and gradient.name:
                raw[gradient.name] = value.name or ""
                quotient = _quotient(value, self.step.scale.value)
                if quotient is not None:
                    quotients[gradient.name] = quotient.name or ""
        return raw, quotients


def _quotient(gradient: ir.Value, scale: ir.Value) -> ir.Value | None:
    """Return a gradient divided by the scale; where the scale enters at the gradient itself, the divided product."""
    pending = [(gradient, True)]
    for value, times in pending:  # grows
        for node, index in uses_of(value):
            other = node.inputs[1 - index] if len(node.inputs) == 2 else None
            if node.op_type == "Div" and index == 0 and is_cast_of(other, scale):
                return node.outputs[0]
            if node.op_type == "Cast" or (times and node.op_type == "Mul" and other is scale):
                pending.append((node.outputs[0], times and node.op_type == "Cast"))
    return None


def open_pair(original: Model, scaled: Model, hints: Hints) -> Pair:
    """Read both graphs, analyse the original, and scale it again if the scaled file carries a stamp.

    Raises:
        VerifyError: the graphs do not belong together.
        AlreadyScaledError: the original carries a loss scale.
        GraphscaleError: a graph cannot be read, the original cannot be scaled, or the other one has no loss scale.
    """
    first, first_name = open_copy(original)
    if is_scaled(first):
        raise AlreadyScaledError(
            f"{first_name} carries a loss scale; the original comes first: verify ORIGINAL SCALED (or, of a split "
            "step, verify STEP GRADS UPDATE)"
        )
    check_order(first.graph, first_name)
    second, second_name, proto = open_copy_with_proto(scaled)
    if not is_scaled(second) and not has_lost_stamp(second):
        return _open_unstamped(first, second, second_name, hints)
    step = _read_step(second, second_name, proto)
    stamp = step.stamp
    if ScaledValue.LOSS not in stamp.names or ScaledValue.WINDOW_FINITE in stamp.names:
        raise VerifyError(
            f"{second_name} is one of the models of an artifact folder, which work on one state; pass both folders: "
            "verify ORIGINAL_FOLDER SCALED_FOLDER"
        )
    misfit = _find_misfit(first.graph, second.graph)
    if misfit is not None:
        what = f"{second_name} is not {first_name} scaled: {misfit}"
        raise VerifyError(f"{what}; pass the original that it was made from")
    if stamp.accepted:
        hints = dataclasses.replace(hints, roles=Answers.of(hints.roles).merge(accepted=True))
    translation = validate_translation(first, step, hints)
    lowered = None
    if is_lowered(second) and not translation.graph:  # one with other nodes is judged as it stands
        lowered, second = second, _expected_plain_form(translation.expected, second)
    prepare(first, hints)
    replace_training_ops(first, get_target(translation.claims.target))
    notes, mixed = list[str](), translation.claims.cast_pass()
    if stamp.accepted:
        notes.append(f"the proposed roles of {few(stamp.accepted)} were accepted when the original was scaled")
    wide, roundable = None, frozenset[str]()
    if mixed is not None and not find_small_types(first.graph):
        wide, roundable = first.clone(), frozenset(find_roundable(understand(first, hints), mixed))
    if mixed is not None:
        dataclasses.replace(mixed, target=translation.claims.target).rewrite(first, hints)
        notes.append(f"the original was put through the same autocast ({mixed.dtype}) before it was compared")
    found = understand(first, hints)
    return Pair(
        original=first,
        step=read(second, second_name),
        analysis=found,
        states=_find_states(found),
        kept=_find_kept(found),
        nodes=pair_models(first, second).nodes,
        translation=translation,
        small=find_small_types(first.graph),
        notes=tuple(notes),
        dtype=None if mixed is None else str(mixed.dtype),
        lowered=lowered,
        wide=wide,
        roundable=roundable,
    )


def _open_unstamped(first: ir.Model, second: ir.Model, name: str, hints: Hints) -> Pair:
    """Analyse an original, and find the loss scale in a step that somebody else scaled."""
    check_order(second.graph, name)
    for model in (first, second):
        prepare(model, hints if model is first else NO_HINTS)
        infer_types(model)  # other tools leave types out
    if not LowerTrainingOps.applies(second):
        replace_training_ops(first, get_target("onnx"))
    found = understand(first, hints)
    step = read_unstamped(second, found, name)
    flag = "" if step.all_finite is None else f", {step.all_finite.name!r} its finite flag"
    return Pair(
        original=first,
        step=step,
        analysis=found,
        states=_find_states(found),
        kept=_find_kept(found),
        nodes={},
        translation=None,
        small=find_small_types(first.graph),
        notes=(f"somebody else scaled this file: {step.scale.value.name!r} is its loss scale{flag}",),
    )


def _expected_plain_form(expected: ir.Model, found: ir.Model) -> ir.Model:
    """Return the plain form of an expected lowered model, with the initial values of the found one."""
    plain = plain_form(expected, "the expected model")
    for value in plain.graph.inputs:
        own = found.graph.initializers.get(value.name or "")
        if own is not None and own.const_value is not None:  # a session adds initial values to all carried inputs
            value.const_value = own.const_value
            plain.graph.initializers[own.name or ""] = value
    return plain


def open_scaled(scaled: Model) -> tuple[Step, str]:
    """Return the step of a copy of a scaled model, and its name for messages.

    Raises:
        GraphscaleError: the model cannot be read, is damaged, or is not scaled.
    """
    model, name, proto = open_copy_with_proto(scaled)
    return _read_step(model, name, proto), name


def _read_step(model: ir.Model, name: str, proto: onnx.ModelProto | None) -> Step:
    rejection = find_rejection(outline(model, proto))
    if rejection is not None:
        raise ModelFileError(f"{name} is damaged: {rejection}")
    step = read(model, name)
    if any(node.domain == DOMAIN and node.op_identifier() not in model.functions for node in model.graph):
        raise ModelFileError(
            f"{name} has lost the function {DOMAIN}::{FUNCTION}: another tool dropped it; scale the original again"
        )
    _check_stamp(step.stamp, name)
    check_order(model.graph, name)
    return step


def _check_stamp(stamp: Stamp, name: str) -> None:
    """Refuse metadata in JSON of another form than scaling's."""
    read_report(stamp, name)
    damaged = f"{name} has damaged graphscale metadata"
    try:
        autocast = stamp.report.get("autocast")
        if autocast is not None:
            tuple(autocast[key] for key in ("dtype", "emulate", "casts", "low_nodes", "kept_nodes"))
    except (AttributeError, KeyError, TypeError) as error:
        raise VerifyError(f"{damaged}: {one_line(error)}") from error
    wrong = next((text for text in stamp.report["missed"] if not isinstance(text, str)), None)
    if wrong is not None:
        raise VerifyError(f"{damaged}: {wrong!r} is no name")


def _find_misfit(original: ir.Graph, scaled: ir.Graph) -> str | None:
    """Return the reason why a graph cannot be the scaled form of another, or None."""
    inputs = {value.name: value for value in scaled.inputs}
    outputs = {value.name: value for value in scaled.outputs}
    widened = find_widened(scaled, original)
    # State that is written in place is no output of the scaled graph.
    missing = [value for value in original.outputs if value.name not in outputs]
    for value in original.inputs:
        if value.name not in inputs:
            return f"it has no input {value_label(value)}"
    if len(missing) > len(nodes_with(scaled, Trait.ACCUMULATOR)):
        return f"it has no output {value_label(missing[0])}"
    for kind, values, others in (("input", original.inputs, inputs), ("output", original.outputs, outputs)):
        for value in values:
            other = others.get(value.name)
            if kind == "output" and value.name in widened and other is not None:
                value = ir.val(value.name, ir.DataType.FLOAT, value.shape)
            if other is not None and not same_type(other, value):
                return f"its {kind} {value_label(other)} is {value_label(value)} in the original"
    return None


def _find_states(found: Step) -> dict[str, str | None]:
    states = {update.input.name or "": update.output.name for update in found.states}
    buffers = [node.inputs[0] for node in found.accumulators]
    buffers += [input_at(node, i) for node in found.graph for i in written_inputs(node)]
    for buffer in buffers:
        if buffer is not None and is_source(buffer):
            states.setdefault(buffer.name or "", None)
    return states


def _find_kept(found: Step) -> frozenset[str]:
    return frozenset(update.input.name or "" for update in found.states if update.kept)


def check_names(pair: Pair) -> None:
    """Check that the metadata name all values that this version names, and that the graph has each.

    Raises:
        VerifyError: a value is missing; the message names the first.
    """
    if pair.translation is None:  # their names come from the graph itself
        return
    step, names = pair.step, pair.step.stamp.names
    outputs, expected = {value.name for value in step.graph.outputs}, pair.translation.stamp.names
    twice = next((role for role, name in names.items() if list(names.values()).count(name) > 1), None)
    if twice is not None:
        raise VerifyError(f"the metadata call {names[twice]!r} the {twice}, and something else, too")
    # Another tool may have folded a constant scale.
    is_folded = not pair.proved and step.all_finite is None and ScaledValue.ALL_FINITE not in expected
    for role in (role for role in ScaledValue if role in expected or (role in RESULTS and role in names)):
        if role not in names:
            raise VerifyError(f"the metadata name no value for the {role.words}")
        if role not in step.named and role != ScaledValue.LOSS and not is_folded:
            raise VerifyError(f"there is no value {names[role]!r}, which the metadata call the {role.words}")
        if role in RESULTS and names[role] not in outputs:
            raise VerifyError(f"{names[role]!r}, which the metadata call {role!r}, is no output")
    if step.scale.value.dtype is not ir.DataType.FLOAT:
        raise VerifyError(f"{step.scale.value.name!r}, which the metadata call the loss scale, is no float32")
