"""unscale-gradients: divide each gradient by the loss scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Unscaling
from graphscale.errors import GradientError
from graphscale.graph.builder import Builder, Editor, behind, replace_reads
from graphscale.graph.marks import UNSCALE_GRADIENTS
from graphscale.graph.types import dtype_of
from graphscale.graph.values import Use, uses_of
from graphscale.operators import attribute
from graphscale.passes.scale_loss import ScaleLoss
from graphscale.passes.step_pass import StepPass
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.step.training_step import UNSCALED, Quotient, Step

__all__ = ["UnscaleGradients"]

_SMALL = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))


@dataclasses.dataclass(frozen=True)
class UnscaleGradients(StepPass):
    """Divide every gradient by the loss scale, once, for all readers that need it unscaled.

    Before: `dw = MatMul(x, dy)`
    After:  `dw.scaled = MatMul(x, dy); dw = Div(dw.scaled, current_loss_scale)`

    A float16 gradient is unscaled in float32, where its smallest elements do not underflow. A reader that casts it to
    float32 gets the float32 quotient; other readers get the quotient in float16.

    Attributes:
        gradient_dtype: "float32" for gradients of smaller types that leave the graph as float32 quotients; None to keep
            their types.
    """

    name = UNSCALE_GRADIENTS
    sign = "÷S"
    after = ScaleLoss

    gradient_dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse other types.

        Raises:
            GradientError: the type is another one.
        """
        if self.gradient_dtype not in (None, "float32"):
            raise GradientError(
                f'gradient_dtype is "float32", or None for unchanged types; got {self.gradient_dtype!r}'
            )

    def apply(self, step: Step, build: Builder) -> Step:
        # If the scale enters at a gradient itself, its readers already read the product.
        pairs = ((each, step.products.get(each.value, each.value)) for each in step.unscalings)
        report, widens = step.report, self.gradient_dtype is not None
        if any(value.dtype in _SMALL for value in step.graph.outputs):
            from graphscale.passes.nodes.small_gradients import report_outputs  # few gradients leave so

            direct = [each.value for each in step.unscalings if _leaves(each) and each.value.dtype in _SMALL]
            report = report_outputs(step, direct, widens)
        quotients = tuple(_unscale(build, each, value, step.scale.value, widens) for each, value in pairs)
        step = dataclasses.replace(step, quotients=quotients, report=report, modified=bool(quotients))
        return dataclasses.replace(step, sums=(*_find_sums(step, build.editor), *step.terms))


def _leaves(unscale: Unscaling) -> bool:
    """Return whether an output is the quotient of a gradient."""
    return unscale.value.is_graph_output() and (unscale.everywhere or unscale.output)


def _find_sums(step: Step, editor: Editor) -> tuple[ir.Value, ...]:
    """Find the values past the gradients that are checked as well: sums in float16."""
    half = ir.DataType.FLOAT16
    casts = (node for node in (step.graph if None in editor.dtypes else ()) if node.op_type == "Cast")
    if half not in editor.dtypes and not any(attribute(node, "to", 0) == half for node in casts):
        return ()
    from graphscale.analysis.past_gradients import find_narrow_sums

    policy = step.scale.policy
    falls = isinstance(policy, DynamicLossScale) and policy.rule.min_loss_scale < 1
    quotients = [] if falls else [quotient.value for quotient in step.quotients]
    # By a scale of at least 1, the quotient of a float16 number is one.
    readers = (use.node for value in quotients for use in uses_of(value))
    exact = {node.outputs[0] for node in readers if UnscaleGradients.inserted(node)}
    exact.update(step.degrees)  # a multiple of the scale is checked as its quotient
    return tuple(find_narrow_sums(tuple(step.graph), step.checked, exact, [step.loss], step.states))


def _unscale(build: Builder, unscale: Unscaling, value: ir.Value, scale: ir.Value, widens: bool) -> Quotient:
    name = unscale.value.name or ""
    dtype = dtype_of(value)
    uses = [use for use in uses_of(value) if unscale.covers(use)]
    is_output = value.is_graph_output() and (unscale.everywhere or unscale.output)
    widens &= is_output and dtype in _SMALL
    wide = ir.DataType.DOUBLE if dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    dividend, divisor = value, scale
    if dtype is not wide:
        dividend = build.cast(value, wide, name=f"{name}.wide", at=behind(value))
    if wide is not ir.DataType.FLOAT:
        divisor = build.cast(scale, wide, name=f"{scale.name}.wide", at=behind(dividend))
    at = behind(dividend if divisor is scale else divisor)
    quotient = build.op("Div", [dividend, divisor], name=f"{name}{UNSCALED}", like=value, dtype=wide, at=at)
    result = _hand_out(build, value, quotient, uses, is_output and not widens)
    if is_output:
        build.editor.take_over_output(value, quotient if widens else result, "scaled")
    if widens:
        quotient.type = ir.TensorType(wide)
    wholes = tuple(sorted(unscale.wholes, key=lambda whole: whole.name or ""))
    only_a_share = len(wholes) == 1 and not is_output and _leads_only_to(uses, wholes[0])
    return Quotient(name, quotient, wholes if only_a_share else (quotient, *wholes))


def _leads_only_to(uses: Sequence[Use], whole: ir.Value) -> bool:
    """Return whether the only reader of a gradient, past factors and views, is the sum around it."""
    readers = [use.node for use in uses]
    while len(readers) == 1 and readers[0].outputs[0] is not whole:
        value = readers[0].outputs[0]
        readers = [] if value.is_graph_output() else [use.node for use in value.uses()]
    return len(readers) == 1


def _hand_out(build: Builder, value: ir.Value, quotient: ir.Value, uses: Sequence[Use], is_output: bool) -> ir.Value:
    """Redirect readers that cast the gradient to the quotient's dtype to the quotient, the others to a narrow copy."""
    dtype, wide = dtype_of(value), quotient.dtype
    casts = [use for use in uses if use.node.op_type == "Cast" and use.node.attributes["to"].as_int() == wide]
    if dtype is wide or (len(casts) == len(uses) and not is_output):
        replace_reads(value, quotient, uses)
        return quotient
    replace_reads(value, quotient, casts)
    narrow = build.cast(quotient, dtype, name=f"{value.name}.narrow", at=behind(quotient))
    replace_reads(value, narrow, [use for use in uses if use not in casts])
    return narrow
