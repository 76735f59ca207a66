"""autocast: compute safe nodes in float16 or bfloat16."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.analysis.hints import Hints
from graphscale.analysis.updates import promote_zeros
from graphscale.collector import paused_collector
from graphscale.errors import AutocastError, TargetError
from graphscale.graph.marks import AUTOCAST
from graphscale.graph.original import record_original
from graphscale.graph.stamp import is_scaled
from graphscale.passes.casting.cast_report import AutocastReport, make_cast_report
from graphscale.passes.casting.casts import CastInserter
from graphscale.passes.casting.denial import deny_nodes
from graphscale.passes.casting.precision_choice import plan_precision
from graphscale.passes.casting.precision_plan import begin_plan
from graphscale.passes.casting.settings import Settings, make_settings
from graphscale.passes.graph_pass import GraphPass
from graphscale.passes.step_pass import is_under_way
from graphscale.step.training_step import Step
from graphscale.step.understanding import understand
from graphscale.targets import Target, get_target, target_names

__all__ = ["AUTOCAST_KEY", "Autocast", "find_roundable"]

# The metadata property of a model in mixed precision, as JSON: the type, whether it is emulated, the changed lists.
AUTOCAST_KEY = "graphscale.autocast"

_DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


@dataclasses.dataclass
class Autocast(GraphPass):
    """Put a float32 training graph into mixed precision.

    Before: `h = MatMul(x, w); a = Relu(h); y = MatMul(a, v)`
    After:  `h = MatMul(Cast(x), Cast(w)); a = Relu(h); y.low = MatMul(a, Cast(v)); y = Cast(y.low)`

    Weights, moments and all other carried state, the loss, the seed of the backward pass and the gradients stay
    float32. Each value is cast once for all readers. With `emulate`, all nodes stay float32, and a pair of casts rounds
    each value of the small type, so that a runtime without float16 arithmetic shows the effects of float16. The pass
    runs before `ScaleLoss`, in the same sequence.

    Attributes:
        dtype: "float16" or "bfloat16".
        emulate: True to round in float32.
        settings: the lists of operators; None for the defaults.
        loss, seed, gradients, updates, roles, target: as for `ScaleLoss`.
        report: the report, after the pass has run.
    """

    name = AUTOCAST
    sign = "f16"
    optional = True

    dtype: str = "float16"
    emulate: bool = False
    settings: Settings | None = None
    loss: str | Sequence[str] | None = None
    seed: str | None = None
    gradients: tuple[str, ...] = ()
    updates: Mapping[str, str] | None = None
    roles: Any = None
    target: str = "onnx"
    report: AutocastReport | None = None

    @classmethod
    def of(cls, autocast: Any, hints: Hints, target: str) -> Self:
        """Return the pass ahead of a scaling, for its hints and its target, of a name of the type or a pass.

        Raises:
            AutocastError: it is neither, or the pass and the scaling differ in an option.
        """
        if isinstance(autocast, str):
            return cls(autocast, target=target)
        if not isinstance(autocast, cls):
            raise AutocastError(f'autocast takes "float16", "bfloat16" or an Autocast pass; got {autocast!r}')
        default = cls()
        for name, value in {**vars(hints), "target": target}.items():
            own = getattr(autocast, name)
            if own not in (getattr(default, name), value):
                raise AutocastError(f"the Autocast pass has {name}={own!r}, and the scaling {name}={value!r}; give one")
        return dataclasses.replace(autocast, target=target)

    @paused_collector()
    def call(self, model: ir.Model) -> PassResult:
        with record_original(model):
            self.rewrite(model)
        return PassResult(model, modified=True)

    @paused_collector()
    def rewrite(self, model: ir.Model, hints: Hints | None = None) -> None:
        """Put a model into mixed precision in place, by hints in place of the pass's own, without a record of it."""
        if not isinstance(self.dtype, str) or self.dtype not in _DTYPES:
            raise AutocastError(f"{AUTOCAST}: the type is float16 or bfloat16; got {self.dtype!r}")
        if is_under_way(model) or is_scaled(model):
            raise AutocastError(
                f"{AUTOCAST}: the model carries a loss scale already; autocast the original, then scale it"
            )
        if AUTOCAST_KEY in model.metadata_props:
            raise AutocastError(f"{AUTOCAST}: the model is in mixed precision already; autocast the original graph")
        dtype, target = _DTYPES[self.dtype], get_target(self.target)
        _check_target(dtype, target, self.emulate)
        _refuse_double(model.graph)
        step = understand(model, hints or Hints.of(self))
        promote_zeros(model.graph, step.states)
        wide_ops = frozenset() if self.emulate else target.wide_ops
        settings = self.settings or make_settings()
        plan = plan_precision(step, settings, dtype, wide_ops)
        report = make_cast_report(step, plan, dtype, self.emulate)
        shapes = [value.shape for value in step.gradients]
        known = [tuple(shape.numpy()) for shape in shapes if shape is not None and shape.is_static()]
        weights = set(known) if len(known) == len(shapes) else None
        inserter = CastInserter(model.graph, plan, dtype, self.emulate, weights)
        inserter.insert()
        self.report = dataclasses.replace(report, casts=inserter.casts)
        facts = {"dtype": self.dtype, "emulate": self.emulate, "lists": settings.to_lists()}
        model.metadata_props[AUTOCAST_KEY] = json.dumps({key: value for key, value in facts.items() if value != {}})


def find_roundable(step: Step, mixed: Autocast) -> Iterator[str]:
    """Yield the names of the values of a float32 step that mixed precision may compute in a small type."""
    settings, dtype = mixed.settings or make_settings(), _DTYPES[mixed.dtype]
    plan = begin_plan(step, settings)
    deny_nodes(plan, step, settings, dtype, ())
    yield from (value.name or "" for node in plan.operators if node not in plan.reasons for value in node.outputs)


def _check_target(dtype: ir.DataType, target: Target, emulate: bool) -> None:
    if dtype is ir.DataType.BFLOAT16 and not (emulate or target.bfloat16):
        raise TargetError(
            f"target {target.name!r} also runs on CPUs, which do not compute in bfloat16; choose target "
            f"{target_names(lambda target: target.bfloat16)}, or emulate it (emulate=True, --emulate)"
        )


def _refuse_double(graph: ir.Graph) -> None:
    """Refuse a graph that computes in float64 alone."""
    dtypes = {value.dtype for node in graph for value in node.outputs}
    if ir.DataType.DOUBLE in dtypes and ir.DataType.FLOAT not in dtypes:
        raise AutocastError("the graph computes in float64; export it in float32, the type that autocast starts from")
