"""Each rule of the table of operators is run by a case, or is listed with its reason."""

from __future__ import annotations

from tests.operators.coverage import find_uncovered


def test_each_rule_is_tried_or_listed() -> None:
    assert not find_uncovered()
