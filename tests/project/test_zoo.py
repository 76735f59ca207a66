"""The frame of models/zoo: truth, registry, forms of a graph, trial. Frameworks alone can export its steps."""

import hashlib
import json
import zipfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from models.zoo import export, pack, reform, shown, styles, trial
from models.zoo.steps import STYLES, Style, Truth, is_aside
from tests.analysis.roles.steps import update_step

pytestmark = pytest.mark.static

MODELS = Path("models/pytorch")
TRUTH = Truth("k", "e", ["loss"], [], [], {"w_next": "w"}, [], ["x"], ["rate"], [])


def momentum() -> tuple[ir.Model, Truth, styles.Feeds]:
    model = ir.load(MODELS / "mlp_momentum.onnx")
    feeds = {
        value.name: array
        for value in model.graph.inputs
        for array in [np.load(MODELS / "mlp_momentum.npz")[value.name]]
    }
    states = {value.name: value.name.removesuffix(".next") for value in model.graph.outputs[1:]}
    rest = [name for name in feeds if name not in states.values()]
    return model, replace(TRUTH, states=states, batch=rest, hyperparameters=[]), feeds


def test_each_name_has_one_role() -> None:
    TRUTH.check(["x", "w", "rate"], ["loss", "w_next"])
    TRUTH.check(["x", "rate"], ["loss", "w_next"])  # w is an initializer
    cases = ((["x", "more"], ["loss", "w_next"]), (["x"], ["loss"]), (["x"], ["loss", "w_next", "more"]))
    for inputs, outputs in cases:
        with pytest.raises(ValueError, match=r"role|differ"):
            TRUTH.check(inputs, outputs)
    with pytest.raises(ValueError, match="without one role"):
        replace(TRUTH, batch=["x", "w"]).check(["x"], ["loss", "w_next"])


def test_truth_under_other_names_and_as_json() -> None:
    renamed = TRUTH.renamed({"loss": "a", "w_next": "b", "w": "c", "x": "d", "rate": "e"})
    assert json.loads(renamed.to_json())["states"] == {"b": "c"}
    assert (renamed.kind, renamed.losses, renamed.batch) == ("k", ["a"], ["d"])


def test_one_kind_of_five_is_set_aside() -> None:
    names = [f"kind-{number}" for number in range(500)]
    assert 70 < sum(map(is_aside, names)) < 130
    assert all(is_aside(name) == (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 5 == 0) for name in names)


@pytest.mark.parametrize(
    "style",
    [
        Style(names="scrambled"),
        Style(names="numbered"),
        Style(names="new_{}", states="initializers"),
        Style(states="initializers"),
        Style(states="overridable", names="scrambled"),
        Style(shapes="interface"),
        Style(shapes="inputs"),
    ],
    ids=Style.describe,
)
def test_a_form_computes_the_same(style: Style, tmp_path: Path) -> None:
    model, truth, feeds = momentum()
    names = [value.name for value in model.graph.outputs]
    expected = np.load(MODELS / "mlp_momentum.npz")
    truth, feeds = styles.apply(style, model, truth, feeds)
    given = [value.name for value in model.graph.inputs]
    truth.check(given, [value.name for value in model.graph.outputs])
    assert set(truth.states.values()) <= set(given) | set(model.graph.initializers)
    assert (set(truth.states.values()) <= set(given)) == (style.states != "initializers")
    ir.save(model, tmp_path / "m.onnx")
    outputs = [value.name for value in model.graph.outputs]
    arrays = [expected[f"expected/{name}"] for name in names]
    note = export.compare(tmp_path / "m.onnx", {name: feeds[name] for name in given}, outputs, arrays, 1e-4)
    assert fnmatch(note, "largest error*")
    assert (outputs == names) == (style.names == "plain")


def test_outputs_that_an_exporter_merges_are_separated_and_named() -> None:
    graph = onnx.parser.parse_graph(
        "g (float w, float x) => (float y, float y, float w) { y = Mul(w, x) \n loss = Neg(y) }"
    )
    made = ir.from_proto(graph)
    styles.separate_outputs(made)
    styles.name_interface(made, ["w", "loss"], ["y_next", "again", "kept"])
    assert [value.name for value in made.outputs] == ["y_next", "again", "kept"]
    assert [value.name for value in made.inputs] == ["w", "loss"]
    produced = [value.name for node in made for value in node.outputs]
    assert produced == ["y_next", "loss_inner", "again", "kept"], "an inner value gives its name to an input"
    assert [node.inputs[0].name for node in list(made)[2:]] == ["y_next", "w"]


def judged(name: str, **changed: object) -> trial.Outcome:
    content, truth = pack.read(name)
    model = onnx.load_from_string(content)
    return trial.judge(name, model, gs.inspect(model), {**truth, **changed})


def test_the_trial_holds_roles_against_the_truth() -> None:
    assert judged("wrap-clip.square").outcome == "right"
    _, truth = pack.read("wrap-clip.square")
    first, second, *_ = truth["states"]
    swapped = truth["states"] | {first: truth["states"][second], second: truth["states"][first]}
    found = judged("wrap-clip.square", states=swapped)
    assert (found.outcome, set(found.reason.split(", "))) == ("wrong", {first, second})
    found = judged("wrap-clip.square", losses=["another"])
    assert (found.outcome, found.reason) == ("wrong", truth["losses"][0])


def test_a_doubtful_loss_is_a_proposal() -> None:
    found = judged("jax-codebook-revival.adam", losses=["another"])
    assert found.outcome == "asked, proposal wrong"


@pytest.mark.parametrize(
    ("read", "outcome"), [("", "asked, no evidence"), ("; s = Cast(b, to=6)", "asked, proposal wrong")]
)
def test_the_trial_tells_inputs_apart_that_nothing_reads(read: str, outcome: str) -> None:
    text = f"p = Greater(dw, w); q = Less(dw, w){read}"
    model = update_step(text, "bool[4,3] a, bool[4,3] b", "bool[4,3] p, bool[4,3] q" + ", int32[4,3] s" * bool(read))
    report = gs.inspect(model)
    pairs = {entry.name: entry.pair for entry in report.roles if entry.kind == "output" and entry.pair}
    truth = {"losses": ["loss"], "states": pairs | {"p": pairs["q"], "q": pairs["p"]}}
    assert trial.judge("k.v", model, report, truth).outcome == outcome


def test_the_trial_takes_a_crash_for_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, truth = pack.read("wrap-clip.square")
    path = tmp_path / "k.v.onnx"
    path.write_bytes(model)
    path.with_suffix(".json").write_text(json.dumps(truth))
    monkeypatch.setattr(gs, "inspect", lambda _: {}[0])
    assert trial.try_step(path) == trial.Outcome("k.v", "wrong", "it raises KeyError")


def test_packing_takes_the_smallest_open_step_and_gives_the_same_bytes(tmp_path: Path) -> None:
    aside = next(f"kind-{n}" for n in range(99) if is_aside(f"kind-{n}"))
    kept = next(f"kind-{n}" for n in range(99) if not is_aside(f"kind-{n}"))
    folder = tmp_path / "open"
    folder.mkdir()
    for name, content in {f"{kept}.a": b"12", f"{kept}.b": b"1", f"{kept}.c": b"12", f"{aside}.a": b"1"}.items():
        (folder / f"{name}.onnx").write_bytes(content)
        (folder / f"{name}.json").write_text("{}")
    chosen = pack.choose([tmp_path])
    assert [path.name for path in chosen] == [f"{kept}.b.onnx"]
    for file in ("one.zip", "two.zip"):
        pack.write(chosen, tmp_path / file)
        assert (pack.names(tmp_path / file), pack.read(f"{kept}.b", tmp_path / file)) == ([f"{kept}.b"], (b"1", {}))
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_a_step_takes_another_form(tmp_path: Path) -> None:
    model, truth, feeds = momentum()
    path = tmp_path / "k.v.onnx"
    ir.save(model, path)
    np.savez(path.with_suffix(".npz"), **feeds)
    path.with_suffix(".json").write_text(truth.to_json())
    folder = tmp_path / "open"
    folder.mkdir()
    assert reform.reform(path, STYLES["scrambled-initializers"], folder)
    made, written = ir.load(folder / path.name), json.loads((folder / "k.v.json").read_text())
    given = [value.name for value in made.graph.inputs]
    assert set(written["states"].values()) <= set(made.graph.initializers) and given == written["batch"]
    assert set(np.load(folder / "k.v.npz")) == set(given)
    assert not reform.reform(folder / path.name, STYLES["bare"], tmp_path), "its states are no inputs"


@pytest.mark.parametrize("form", shown.FORMS)
def test_a_value_of_the_inside_is_shown(form: str) -> None:
    model = onnx.load(MODELS / "mlp_momentum.onnx")
    shapes = shown.values_of(model)
    name = next(name for name, shape in shapes.items() if len(shape) == 2)
    more = shown.show(model, form, name, shapes[name])
    assert more is not None
    onnx.checker.check_model(more, full_check=True)
    feeds = np.load(MODELS / "mlp_momentum.npz")
    found, whole = trial._run(more, {value.name: feeds[value.name] for value in more.graph.input}), {"largest": np.max}
    assert found[shown.NAME].shape == (() if form in shown.REDUCTIONS else shapes[name])
    if form in whole:
        more.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes[name]))
        again = trial._run(more, {value.name: feeds[value.name] for value in more.graph.input})
        assert again[shown.NAME] == whole[form](again[name])


def test_shown_values_are_judged(tmp_path: Path) -> None:
    """The loss stays the loss beside a mean and a norm of some value, and no other pair is certain."""
    with zipfile.ZipFile("models/zoo/steps.zip") as steps:
        for suffix in (".onnx", ".json"):
            steps.extract(f"adabelief.square{suffix}", tmp_path)
    found = [*shown.outcomes(tmp_path / "adabelief.square.onnx", seed=1)]
    assert {form for form, *_ in found} >= {*shown.REDUCTIONS, "itself"}
    assert {outcome for *_, outcome, _ in found} <= {"right", "asked"}
