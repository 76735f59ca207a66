"""Random edits of scaled graphs, a part of `benchmarks/random_edits.py`: accepted edits change no result."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.edits.behaviour import Behaviour, UnlikeError
from benchmarks.edits.draw import KINDS
from benchmarks.edits.generator import edit
from benchmarks.edits.subjects import Subject
from benchmarks.edits.table import write_table
from benchmarks.random_edits import Attack

SUBJECTS = [Subject("models/pytorch/mse_tanh", "telemetry"), Subject("models/pytorch/clip_by_value", "plain")]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """onnx_ir warns of each edited graph that lacks a value."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_accepted_edits_change_nothing(first: int, tmp_path: Path) -> None:
    attack = Attack(seed=2, chosen=SUBJECTS)
    records = [attack.judge(index) for index in range(first, first + 50)]
    assert [r for r in records if r["verdict"] not in ("rejected", "equal", "unloadable")] == []
    counts = Counter(record["verdict"] for record in records)
    assert counts["rejected"] > 25 and counts["equal"] > 2 and counts["unloadable"] < 3
    assert write_table(tmp_path / "table.md", 2, records) == []


def test_an_edit_can_be_made_again() -> None:
    one, other = Attack(2, SUBJECTS).edited(7), Attack(2, SUBJECTS).edited(7)
    assert one[1].places == other[1].places
    assert one[1].model.SerializeToString(deterministic=True) == other[1].model.SerializeToString(deterministic=True)
    assert one[1].model != one[0].scaled


@pytest.mark.full
def test_every_kind_of_edit_is_made() -> None:
    model = Subject("models/zoo/optimizer-in-if.sgd-flag", "ort-training").scaled
    made = {kind for index in range(1500) for kind in edit(model, np.random.default_rng(index), [model]).kinds}
    assert made == set(KINDS)


@pytest.mark.full
def test_a_difference_is_seen() -> None:
    """A weight of the loss scale's rule that nothing but a growth shows."""
    subject = SUBJECTS[0]
    behaviour = Behaviour(subject, seed=0)
    assert behaviour.loads and behaviour.ran > 12
    behaviour.compare(subject.scaled)
    edited = onnx.ModelProto.FromString(subject.scaled.SerializeToString())
    node = next(node for node in edited.graph.node if node.op_type == "UpdateLossScale")
    next(attribute for attribute in node.attribute if attribute.name == "multiplier").f = 4.0
    with pytest.raises(UnlikeError, match="ONNX Runtime"):
        behaviour.compare(edited)
