"""Each rule of the table of operators is run by a case, or is listed with its reason."""

from __future__ import annotations

from tests.operators.coverage import find_uncovered
from tests.operators.report import PAGE, fill_page, read_numbers


def test_each_rule_is_tried_or_listed() -> None:
    assert not find_uncovered()


def test_the_page_lists_what_is_tried() -> None:
    page = PAGE.read_text()
    assert page == fill_page(read_numbers(page)), "python -m tests.operators.report --lists writes them"
