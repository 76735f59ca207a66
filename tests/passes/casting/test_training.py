"""Training in mixed precision with a loss scale: the loss falls as in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from graphscale.ort.fusing import fuse
from graphscale.passes import Autocast
from tests.conftest import Arrays, load_example
from tests.ort.artifacts.training_session import FOLDERS, LOADABLE, RATE, batches, start, train
from tests.passes.casting.borders import assert_well_cast

pytestmark = pytest.mark.sample(1)

POLICY = gs.DynamicLossScale(2**12, increment_period=15)
WAYS: dict[str, Autocast] = {"typed": Autocast(), "emulated": Autocast(emulate=True)}
WITH_AN_OPTIMIZER = (
    "jax/mlp_adam",
    "jax/mlp_adamw_clip",
    "jax/mlp_sgd",
    "pytorch/attention_adamw_clip",
    "pytorch/attention_sgd",
    "pytorch/clip_by_value",
    "pytorch/mlp_momentum",
)
each_way = pytest.mark.parametrize("way", WAYS)


def run(model: Any, feeds: Sequence[Arrays], state: Arrays) -> tuple[list[float], gs.Session]:
    """Train with a session; the loss of each step, and the session."""
    session = gs.Session(model, state=state)
    loss = session.stamp.names["loss"]
    return [float(session.step(batch)[loss]) for batch in feeds], session


def assert_falls_alike(mixed: Sequence[float], wide: Sequence[float]) -> None:
    """At each step within 2 % of what was there at first, and at the end as far down."""
    assert np.isfinite(mixed).all()
    assert wide[-1] < wide[0]
    np.testing.assert_allclose(mixed, wide, rtol=0.02, atol=0.02 * (wide[0] - wide[-1]))


@pytest.mark.full
@each_way
@pytest.mark.parametrize("name", WITH_AN_OPTIMIZER)
def test_steps_of_models(name: str, way: str) -> None:
    """On one batch, with a scale that grows on the way; no step but those of too large a scale is skipped."""
    example = load_example(name)
    reference = gs.scale(example.path, POLICY)
    carried = {state.input for state in reference.report.state}
    state = {key: value for key, value in example.feeds.items() if key in carried}
    batch = {key: value for key, value in example.feeds.items() if key not in carried}
    result = gs.scale(example.path, POLICY, autocast=WAYS[way])
    assert result.report.coverage == 1.0
    wide, _ = run(reference, [batch] * 40, state)
    mixed, session = run(result, [batch] * 40, state)
    assert_falls_alike(mixed, wide)
    assert session.loss_scale == 2.0**14
    after = session.state_dict()
    assert {key: after[key].dtype for key in state} == {key: value.dtype for key, value in state.items()}


# --- artifact folders and fused steps ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.training
@each_way
@pytest.mark.parametrize("name", LOADABLE)
def test_fused_steps(name: str, way: str) -> None:
    """Fused and then cast, and scaled with explicit state, and with state that is written in place."""
    feeds = [{**batch, **RATE} for batch in batches(name, 40)]
    wide, _ = run(gs.scale(fuse(FOLDERS / name).model, POLICY), feeds, {})
    original = ir.to_proto(fuse(FOLDERS / name).model)
    for target in ("onnx", "ort-training"):
        result = gs.autocast(original, emulate=way == "emulated", target=target)
        assert_well_cast(original, result)
        assert result.report.low_nodes > 0
        mixed, session = run(gs.scale(result.model, POLICY, target=target), feeds, {})
        assert_falls_alike(mixed, wide)
        assert session.loss_scale == 2.0**14


@pytest.mark.training
@each_way
@pytest.mark.parametrize("name", LOADABLE)
def test_artifact_folders(name: str, way: str, tmp_path: Path) -> None:
    """ONNX Runtime's own training session on the folder, cast, and cast and scaled."""
    feeds = batches(name, 40)
    wide = train(start(FOLDERS / name), feeds)
    report = autocast_artifacts(FOLDERS / name, tmp_path / "cast", emulate=way == "emulated")
    assert report.low_nodes > 0
    gs.scale_artifacts(FOLDERS / name, tmp_path / "at_once", POLICY, autocast=WAYS[way])
    gs.scale_artifacts(tmp_path / "cast", tmp_path / "in_two_steps", POLICY)
    for folder in ("cast", "at_once", "in_two_steps"):
        session = start(tmp_path / folder)
        assert_falls_alike(train(session, feeds), wide)
        assert {value.dtype for value in session.parameters().values()} == {np.dtype(np.float32)}
    graphs = [
        onnx.load(tmp_path / folder / "training_model.onnx").graph.SerializeToString(deterministic=True)
        for folder in ("at_once", "in_two_steps")
    ]
    assert graphs[0] == graphs[1]


@pytest.mark.full
@pytest.mark.training
@pytest.mark.parametrize("name", LOADABLE)
def test_a_folder_that_is_cast_can_be_fused(name: str, tmp_path: Path) -> None:
    autocast_artifacts(FOLDERS / name, tmp_path / "cast", emulate=True)
    feeds = [{**batch, **RATE} for batch in batches(name, 40)]
    wide, _ = run(gs.scale(fuse(FOLDERS / name).model, POLICY), feeds, {})
    mixed, _ = run(gs.scale(fuse(tmp_path / "cast").model, POLICY), feeds, {})
    assert_falls_alike(mixed, wide)
