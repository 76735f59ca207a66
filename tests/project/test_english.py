"""The English of docstrings, comments, messages and pages keeps the rules of tests/project/writing.py."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from tests.project.writing import EXCEPTIONS, LONG, LONGEST_SENTENCE, RULES, Rule, Text, count_words, texts

pytestmark = pytest.mark.static


@functools.cache
def all_texts() -> tuple[Text, ...]:
    return tuple(texts())


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_texts_keep_the_rule(rule: Rule) -> None:
    broken = [
        f"{text.place}: {sentence}"
        for text in all_texts()
        if rule.covers(text) and (text.place, rule.name) not in EXCEPTIONS
        for sentence in text.sentences()
        if rule.finds(sentence)
    ]
    assert broken == [], f"{rule.name}: write {rule.advice}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_find_the_bad_example_alone(rule: Rule) -> None:
    assert any(map(rule.finds, Text("page", "", rule.bad).sentences()))
    assert not any(map(rule.finds, Text("page", "", rule.good).sentences()))


@pytest.mark.full
def test_sentences_are_short() -> None:
    long = [
        f"{text.place}: {sentence}"
        for text in all_texts()
        if text.kind != "message" and (text.place, LONG) not in EXCEPTIONS
        for sentence in text.sentences()
        if count_words(sentence) > LONGEST_SENTENCE
    ]
    assert long == []


@pytest.mark.full
def test_first_lines_of_docstrings_name() -> None:
    describing = re.compile(r"(What|Whether|Which|Who|How|Where|When|That|Those)\b")
    assert [text.place for text in all_texts() if text.kind == "docstring" and describing.match(text.text)] == []


@pytest.mark.full
def test_exceptions_are_needed() -> None:
    broken: dict[str, Callable[[str], object]] = {rule.name: rule.finds for rule in RULES}
    broken[LONG] = lambda sentence: count_words(sentence) > LONGEST_SENTENCE
    for (place, name), reason in EXCEPTIONS.items():
        assert reason
        held = [text for text in all_texts() if text.place == place]
        assert any(broken[name](sentence) for text in held for sentence in text.sentences()), (place, name)
