"""Damage to initial values and to the metadata, the claims of a file."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from benchmarks.mutation import sites as at
from benchmarks.mutation.damaged import Damaged
from benchmarks.mutation.kinds import kind
from graphscale.graph.marks import AUTOCAST
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.passes.lower_precision import AUTOCAST_KEY

# --- initial values ---------------------------------------------------------------------------------------------------


def _start(d: Damaged, value: ir.Value | None, number: Any) -> None:
    assert value is not None and value.const_value is not None
    old = value.const_value.numpy()
    value.const_value = ir.tensor(np.full_like(old, number), name=value.name)


for _name, _number in {
    "NaN": np.nan,
    "an infinite scale": np.inf,
    "a scale of 0": 0.0,
    "a negative scale": -1.0,
    "a scale of 2**120": 2.0**120,
    "another power of two": 2.0**14,
}.items():
    kind(f"begin with {_name}", at.dynamic)(lambda d, site, number=_number: _start(d, d.scale, number))

kind("begin with -100000 good steps", at.role("good_steps"))(lambda d, site: _start(d, d.role(site), -100000))
kind("begin with a hysteresis of -5", at.role("hysteresis_left"), scaling="megatron")(
    lambda d, site: _start(d, d.role(site), -5)
)
kind("begin with -7 skipped steps", at.role("skipped_steps"), scaling="telemetry")(
    lambda d, site: _start(d, d.role(site), -7)
)


@kind("begin with the scale of another shape", at.dynamic)
def _shape(d: Damaged, site: str) -> None:
    d.scale.const_value = ir.tensor(np.ones(1, np.float32), name=d.scale.name)


@kind("begin without a scale", at.dynamic)
def _no_scale(d: Damaged, site: str) -> None:
    d.graph.initializers.pop(d.scale.name or "")
    d.scale.const_value = None


@kind("begin with a weight that is off by an ulp", at.held)
def _other_weight(d: Damaged, site: str) -> None:
    value = d.values[site]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array.reshape(-1)[-1] = np.nextafter(array.reshape(-1)[-1], np.float32(np.inf))
    value.const_value = ir.tensor(array, name=site)


# --- metadata ---------------------------------------------------------------------------------------------------------


def _edited(key: str, edit: Callable[[Any], object]) -> Callable[[Damaged, str], None]:
    def damage(d: Damaged, site: str) -> None:
        content = d.read(key)
        edit(content)
        d.write(key, content)

    return damage


def _swap_outputs(d: Damaged, site: str) -> None:
    one, other = site.split(" ")
    state = d.read("state")
    state[one], state[other] = state[other], state[one]
    d.write("state", state)


kind("swap two states in the metadata", at.twin_states)(_swap_outputs)


@kind("swap two states in the graph", at.twin_states)
def _swap_in_graph(d: Damaged, site: str) -> None:
    _exchange(d, *(d.values[d.stamp.state[name]] for name in site.split(" ")))


@kind("swap two states in the graph and in the metadata", at.twin_states)
def _swap_in_both(d: Damaged, site: str) -> None:
    _swap_in_graph(d, site)
    _swap_outputs(d, site)


def _exchange(d: Damaged, one: ir.Value, other: ir.Value) -> None:
    """Exchange two outputs."""
    first, second = ([value is each for value in d.graph.outputs].index(True) for each in (one, other))
    d.graph.outputs[first], d.graph.outputs[second] = other, one
    one.name, other.name = other.name, one.name


kind("forge the values that the scale misses", at.anywhere)(
    _edited("report", lambda report: report["missed"].append("forged"))
)
kind("forge the coverage", at.anywhere)(_edited("report", lambda report: report.update(coverage=0.5)))
kind("forge the places", at.anywhere)(_edited("report", lambda report: report["places"].pop()))
kind("forge the gradients of the report", at.anywhere)(_edited("report", lambda report: report["gradients"].pop()))
kind("forge the loss of the report", at.anywhere)(_edited("report", lambda report: report.update(loss="other")))


@kind("forget a state in the report", at.states("weight", "moment", "counter", dtype=None))
def _forget_row(d: Damaged, site: str) -> None:
    report = d.read("report")
    report["state"] = [row for row in report["state"] if row["input"] != site]
    d.write("report", report)


@kind("forge a role in the report", at.batches)
def _role(d: Damaged, site: str) -> None:
    report = d.read("report")
    for row in report["roles"]:
        if row["name"] == site:
            row["role"] = "kept"
    d.write("report", report)


kind("another class of policy in the metadata", at.dynamic)(
    _edited("policy", lambda policy: policy.update(class_name="FixedLossScale", config={"loss_scale_value": 2.0}))
)
kind("another first scale in the metadata", at.dynamic)(
    _edited("policy", lambda policy: policy["config"].update(initial_loss_scale=64.0))
)
kind("another period in the metadata", at.dynamic)(
    _edited("policy", lambda policy: policy["config"].update(increment_period=7))
)
kind("another fixed scale in the metadata", at.anywhere, scaling="fixed")(
    _edited("policy", lambda policy: policy["config"].update(loss_scale_value=2048.0))
)
kind("name another value the loss", at.loss)(lambda d, site: _rename_role(d, "loss", d.stamp.names["loss_scale"]))
kind("name another value the flag", at.flag)(lambda d, site: _rename_role(d, "all_finite", d.stamp.names["loss"]))
kind("forget the flag in the metadata", at.flag)(_edited("names", lambda names: names.pop("all_finite")))
kind("exchange counters in the metadata", at.role("skipped_steps"), scaling="telemetry")(
    _edited("names", lambda names: names.update(steps=names["skipped_steps"], skipped_steps=names["steps"]))
)
kind("reorder the gradients of telemetry", at.all_of(at.gradients, least=2), scaling="telemetry")(
    _edited("telemetry", lambda telemetry: telemetry["gradients"].reverse())
)
kind("forget telemetry in the metadata", at.anywhere, scaling="telemetry")(
    lambda d, site: d.model.metadata_props.pop("graphscale.telemetry") and None
)


def _rename_role(d: Damaged, role: str, name: str) -> None:
    names = d.read("names")
    names[role] = name
    d.write("names", names)


def _other_target(d: Damaged) -> Iterator[str]:
    yield from (name for name in ("onnx", "ort-training") if name != d.stamp.target)


@kind("claim another target", _other_target)
def _target(d: Damaged, site: str) -> None:
    d.model.metadata_props["graphscale.target"] = site


def _small(d: Damaged) -> Iterator[str]:
    """Operators that read what autocast has cast to float16."""
    for node in d.by(AUTOCAST, "Cast"):
        if node.attributes["to"].as_int() == ir.DataType.FLOAT16:
            yield from (use.node.op_type for use in node.outputs[0].uses())


@kind("claim other lists of mixed precision", _small, scaling="float16")
def _lists(d: Damaged, site: str) -> None:
    claims = {"dtype": "float16", "emulate": False, "lists": {"deny": [site]}}
    d.model.metadata_props[AUTOCAST_KEY] = json.dumps(claims)


@kind("claim emulation", at.anywhere, scaling="float16")
def _emulation(d: Damaged, site: str) -> None:
    d.model.metadata_props[AUTOCAST_KEY] = '{"dtype": "float16", "emulate": true}'


@kind("forget autocast in the metadata", at.anywhere, scaling="float16")
def _no_autocast(d: Damaged, site: str) -> None:
    d.model.metadata_props.pop(AUTOCAST_KEY)


@kind("another node in the record of the original", at.anywhere)
def _record_node(d: Damaged, site: str) -> None:
    _forge_record(d, lambda record: setattr(record.graph.node[0], "op_type", "Forged"))


@kind("another opset in the record of the original", at.anywhere)
def _record_opset(d: Damaged, site: str) -> None:
    _forge_record(d, lambda record: setattr(record.opset_import[0], "version", 7))


@kind("another function in the record of the original", at.anywhere)
def _record_function(d: Damaged, site: str) -> None:
    opset = onnx.helper.make_opsetid("", 17)
    _forge_record(d, lambda record: record.functions.add(name="Relu", opset_import=[opset]))


def _forge_record(d: Damaged, edit: Callable[[onnx.ModelProto], object]) -> None:
    packed = base64.b64decode(d.model.metadata_props[ORIGINAL_KEY])
    record = onnx.ModelProto.FromString(zlib.decompressobj().decompress(packed))
    edit(record)
    d.model.metadata_props[ORIGINAL_KEY] = base64.b64encode(zlib.compress(record.SerializeToString())).decode()
