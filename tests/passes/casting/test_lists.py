"""The lists, from Python: changes, the effect of each entry, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale import errors
from graphscale.operators import Colour
from graphscale.passes import Autocast
from graphscale.passes.casting.settings import default_rules, make_settings
from tests.build import feeds_for, step
from tests.conftest import Level, run_once
from tests.passes.casting.borders import assert_well_cast, low_nodes
from tests.passes.casting.rounding import is_rounded, run_all_values
from tests.passes.casting.test_choice import ops, reasons

pytestmark = pytest.mark.static

RULES = default_rules()


def network(layer: str = "a = Tanh(h)", **options: Any) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(step(layer=layer, **options))


class TestData:
    def test_every_denied_operator_has_a_reason(self) -> None:
        for operator, rule in RULES.items():
            assert bool(rule.reason) == (rule.colour is Colour.DENY), operator

    def test_indices_of_wide_operands_exist(self) -> None:
        """In some version of the operator."""
        sides: dict[str, tuple[int, int]] = {}
        for schema in onnx.defs.get_all_schemas_with_history():
            inputs, outputs = sides.get(schema.name, (0, 0))
            sides[schema.name] = max(inputs, len(schema.inputs)), max(outputs, len(schema.outputs))
        for (domain, name), rule in RULES.items():
            if not domain and name in sides:
                assert all(i < sides[name][0] for i in rule.wide_inputs), name
                assert all(i < sides[name][1] for i in rule.wide_outputs), name

    def test_what_overflows_first_is_denied(self) -> None:
        for name in ("Exp", "Log", "Pow", "Softmax", "LogSoftmax", "ReduceMean", "SoftmaxCrossEntropyLoss", "CumSum"):
            assert RULES["", name].colour is Colour.DENY
        for name in ("SoftmaxGrad_13", "LogSoftmaxGrad_13", "GatherGrad", "SoftmaxCrossEntropyLossInternalGrad"):
            assert RULES["com.microsoft", name].colour is Colour.DENY

    def test_the_defaults_cannot_be_changed_by_accident(self) -> None:
        default_rules()["", "MatMul"] = default_rules()["", "Exp"]
        assert default_rules()["", "MatMul"].colour is Colour.ALLOW


class TestChanges:
    def test_deny(self) -> None:
        result = gs.autocast(step(), deny=["Transpose"])
        assert reasons(result, "Transpose") == {"on the user's deny list": 3}
        assert_well_cast(step(), result)

    def test_deny_all_contractions(self) -> None:
        result = gs.autocast(step(), deny=["MatMul"])
        assert (result.report.low_nodes, result.report.casts) == (0, 0)
        untouched = ir.to_proto(ir.from_proto(step())).graph
        assert result.model.graph.SerializeToString(deterministic=True) == untouched.SerializeToString(
            deterministic=True
        )

    def test_allow(self) -> None:
        """Exp alone in float16, between products in float32: cast in and out."""
        model = network("a = Exp(h)")
        assert ops(gs.autocast(model))["Exp"] == (0, 1)
        result = gs.autocast(model, allow=["Exp"])
        assert ops(result)["Exp"] == (1, 0)
        assert_well_cast(model, result)
        assert low_nodes(result.model, "float16")
        outputs, _ = run_once(gs.autocast(model, allow=["Exp"], emulate=True).model, feeds_for(model))
        assert np.isfinite(outputs["dw1"]).all()

    @pytest.mark.parametrize("field", ["allow", "infer", "clear", "deny"])
    def test_each_list(self, field: str) -> None:
        """Sin: free of denied operands, taken by all lists but one."""
        model = network("a = Sin(h)")
        result = gs.autocast(model, lists={field: ["Sin"]})
        assert ops(result)["Sin"] == ((0, 1) if field == "deny" else (1, 0))
        assert_well_cast(model, result)

    @pytest.mark.parametrize("field", ["allow", "infer", "clear"])
    def test_whatever_list_it_is_on_its_results_are_rounded(self, field: str) -> None:
        model = network("a = Sin(h)")
        result = gs.autocast(model, lists={field: ["Sin"]}, emulate=True)
        values = run_all_values(result.model, feeds_for(model), Level.ORT_DISABLE_ALL)
        assert is_rounded(values["a.rounded"], "float16")
        assert not is_rounded(values["a"], "float16")
        readers = [node.op_type for node in result.model.graph.node if "a" in node.input]
        assert readers == ["Cast"]

    def test_infer_is_not_taken_behind_a_denied_one(self) -> None:
        model = network("e = Softmax(h) a = Sin(e)")
        taken = {field: ops(gs.autocast(model, lists={field: ["Sin"]}))["Sin"][0] for field in ("allow", "infer")}
        assert taken == {"allow": 1, "infer": 0}

    def test_a_file_and_what_comes_on_top(self, tmp_path: Path) -> None:
        path = tmp_path / "lists.json"
        model = network("[odd] a = Sin(h)")
        path.write_text(json.dumps({"deny": ["Sin"], "keep": ["odd"]}))
        for lists in (path, str(path), {"deny": ["Sin"], "keep": ["odd"]}):
            assert reasons(gs.autocast(model, lists=lists), "Sin") == {"kept by the user": 1}
        path.write_text(json.dumps({"deny": ["Sin"]}))
        assert reasons(gs.autocast(model, lists=path), "Sin") == {"on the user's deny list": 1}
        assert ops(gs.autocast(model, lists=path, allow=["Sin"]))["Sin"] == (1, 0)
        path.write_text(json.dumps({"allow": ["Sin"]}))
        assert ops(gs.autocast(model, lists=path, deny=["Sin"]))["Sin"] == (0, 1)
        path.write_text("{}")
        assert gs.autocast(model, lists=path).report == gs.autocast(model).report

    def test_spellings_of_a_name(self) -> None:
        for name in ("Gelu", "com.microsoft::Gelu", "ai.onnx::Gelu"):
            changed = {op for op, rule in make_settings(deny=[name]).rules.items() if rule != RULES.get(op)}
            assert changed == {("com.microsoft" if "::" in name and "microsoft" in name else "", "Gelu")}

    def test_an_operator_of_ones_own(self) -> None:
        """It is denied by default, and can be allowed."""
        settings = make_settings(allow=["acme::FastGelu"])
        assert settings.rules["acme", "FastGelu"].colour is Colour.ALLOW

    def test_the_wide_operands_stay(self) -> None:
        """A changed list does not change which operands are statistics."""
        settings = make_settings(allow=["BatchNormalization"])
        assert settings.rules["", "BatchNormalization"].wide_inputs == (1, 2, 3, 4)

    # Operators that give float32 whatever they read: they are unchanged, or the list is refused.
    @pytest.mark.parametrize("operator", ["Cast", "Constant", "ConstantOfShape", "OneHot", "RandomNormalLike", "Range"])
    def test_allowing_what_has_a_type_of_its_own(self, operator: str) -> None:
        layer = """
            i = Cast<to = 7>(h) c = Cast<to = 1>(i) shape = Shape(h) o = ConstantOfShape<value = float[1] {0.5}>(shape)
            k = Constant<value_float = 0.3>() l = RandomNormalLike<dtype = 1, seed = 1.0>(h)
            p = OneHot<axis = -1>(picks, five, on_off) q = Range(nought, five_f, one)
            s = Sum(h, c, o, k, l, p, q) a = Relu(s)
        """
        model = network(
            layer,
            inputs="int64[8] picks",
            constants="int64 five = {5}, float[2] on_off = {0, 1}, float nought = {0}, float five_f = {5}",
        )
        assert operator in said_or_ran(model, operator)


def said_or_ran(model: onnx.ModelProto, operator: str, **given: object) -> str:
    """The name, where an operator that is allowed is no harm; or the message where it is refused."""
    try:
        result = gs.autocast(model, allow=[operator])
    except errors.AutocastError as error:
        return str(error)
    run_once(result.model, feeds_for(model, **given))
    return operator


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a misspelt name": ({"deny": ["MatMull"]}, ("'MatMull'", "did you mean MatMul?")),
    "another case": ({"allow": ["softmax"]}, ("'softmax'", "did you mean Softmax?")),
    "another case of a short name": ({"allow": ["relu"]}, ("'relu'", "did you mean Relu?")),
    "a gradient operator": ({"deny": ["LayerNormGrad"]}, ("'LayerNormGrad'", "did you mean LayerNormalizationGrad?")),
    "nothing like it": ({"deny": ["Zzyzx"]}, ("'Zzyzx'", "DOMAIN::NAME")),
    "an empty name": ({"deny": [""]}, ("deny takes names", "''")),
    "a domain without it": ({"deny": ["com.microsoft::Nope"]}, ("com.microsoft::Nope",)),
    "an operator of another domain": ({"deny": ["com.microsoft::MatMul"]}, ("com.microsoft::MatMul",)),
    "allowed and denied": ({"allow": ["Exp"], "deny": ["Exp"]}, ("Exp", "allowed and denied", "choose one")),
    "in two spellings": ({"allow": ["Exp"], "deny": ["ai.onnx::Exp"]}, ("Exp", "choose one")),
    "on two lists": ({"lists": {"infer": ["Exp"], "clear": ["Exp"]}}, ("Exp", "infer", "clear")),
    "an unknown list": ({"lists": {"alow": ["Exp"]}}, ("'alow'", "allow, infer, clear, deny and keep")),
    "a name for a list": ({"lists": {"allow": "Exp"}}, ("'allow'", "a list of names")),
    "numbers for names": ({"lists": {"allow": [1]}}, ("'allow'", "a list of names")),
    "nested names": ({"lists": {"deny": [["MatMul"]]}}, ("'deny'", "a list of names")),
    "no list": ({"lists": {"allow": None}}, ("'allow'", "a list of names")),
    "keep is a name": ({"lists": {"keep": "first"}}, ("'keep'", "a list of names")),
    "a node that is not there": ({"keep": ["nope"]}, ("'nope'",)),
    "a node without a name": ({"keep": [""]}, ("''",)),
    "a node that is almost there": ({"keep": ["frist"]}, ("'frist'", "did you mean 'first'?")),
    "an unknown node in the lists": ({"lists": {"keep": ["nope"]}}, ("'nope'",)),
    "an unknown type": ({"dtype": "float8"}, ("float16 or bfloat16", "'float8'")),
    "a numpy type": ({"dtype": np.float16}, ("float16 or bfloat16",)),
    "a type in capitals": ({"dtype": "FLOAT16"}, ("float16 or bfloat16", "'FLOAT16'")),
    "a list of types": ({"dtype": ["float16"]}, ("float16 or bfloat16",)),
    "a name for names": ({"deny": "MatMul"}, ("deny", "'MatMul'", "list")),
    "a node's name for names": ({"keep": "MatMul"}, ("keep", "'MatMul'", "list")),
    "a number for a name": ({"deny": [5]}, ("5",)),
    "lists that are a list": ({"lists": ["MatMul"]}, ("lists", "JSON file")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    options, words = BAD[name]
    with pytest.raises(errors.AutocastError) as raised:
        gs.autocast(network("[first] a = Tanh(h)"), **options)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("given", [True, False, 5, ["float16"], {"dtype": "float16"}, Autocast, "half", ""])
def test_what_scale_takes_for_autocast(given: Any) -> None:
    with pytest.raises(errors.AutocastError, match="float16"):
        gs.scale(step(), autocast=given)


def test_other_arguments() -> None:
    for options, kind in (
        ({"target": "tpu"}, errors.TargetError),
        ({"loss": "nope"}, errors.LossError),
        ({"loss_scale": 0.5}, errors.InvalidLossScaleError),
        ({"seed": "nope:0"}, errors.SeedNotFoundError),
        ({"gradients": ["nope"]}, errors.GradientError),
        ({"updates": {"nope": "w1"}}, errors.UpdateError),
    ):
        with pytest.raises(kind):
            gs.autocast(step(), **options)
    with pytest.raises(errors.ModelFileError):
        gs.autocast("missing.onnx")


def test_a_pass_for_another_target_is_refused() -> None:
    """bfloat16 for a runtime that has it, in a graph for one that has not."""
    for target, other in (("onnx", "ort-cuda"), ("ort-training", "ort-training-cuda")):
        with pytest.raises(errors.GraphscaleError):
            gs.scale(step(), target=target, autocast=Autocast("bfloat16", target=other))
