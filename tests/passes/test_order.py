"""The facts of the passes, and their order."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import graphscale
from graphscale.passes import (
    ORDER,
    AddTelemetry,
    Autocast,
    GraphPass,
    ScaleLoss,
    StepPass,
    UpdateLossScale,
    standard_passes,
)

pytestmark = pytest.mark.static


def test_names() -> None:
    names = [kind.name for kind in ORDER]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


def test_every_pass_has_a_sign_of_its_own() -> None:
    assert len({kind.sign for kind in ORDER} - {GraphPass.sign}) == len(ORDER)


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.name)
def test_a_pass_comes_after_those_that_it_builds_on(kind: type[GraphPass]) -> None:
    if issubclass(kind, StepPass):
        assert ORDER.index(kind.after) < ORDER.index(kind)
        assert not kind.after.optional, "an optional pass may not have run"
    else:
        assert ORDER.index(kind) <= ORDER.index(ScaleLoss), "nothing else begins a rewrite"


def test_standard_passes() -> None:
    required = [kind for kind in ORDER if not kind.optional]
    assert [type(one) for one in standard_passes()] == required
    scale_loss, mixed = ScaleLoss(4), Autocast("bfloat16")
    chosen = standard_passes(AddTelemetry(), scale_loss, mixed)
    kinds = [type(one) for one in chosen]
    assert kinds == [kind for kind in ORDER if kind in {*required, Autocast, AddTelemetry}]
    assert chosen[0] is mixed
    assert chosen[1] is scale_loss
    assert kinds.index(AddTelemetry) == kinds.index(UpdateLossScale) + 1


def test_the_scale_is_renewed_by_required_passes() -> None:
    """`scale_nodes` asks no optional one."""
    assert not any(kind.renews_scale for kind in ORDER if kind.optional)


@pytest.mark.full
def test_no_other_module_spells_a_name_out() -> None:
    names = {kind.name for kind in ORDER if "-" in kind.name}
    places = Counter(
        node.value
        for path in Path(graphscale.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    )
    assert places == dict.fromkeys(names, 1)
