"""The tables of behaviour, made again and compared.

After a wanted change: `python -m tests.frozen.write`, and read the difference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.mutation import KINDS
from tests.frozen.stored import FOLDER, read_table
from tests.frozen.tables import TABLES
from tests.frozen.write import differences, make_row

pytestmark = pytest.mark.static


def rows_of(name: str, some: int) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Give a test the keys of a table, some of them in the quick tier; those alone that have a mutant."""
    keys = [key for key, row in read_table(name).items() if row.get("mutant", "") is not None]

    def mark(test: Callable[[str], None]) -> Callable[[str], None]:
        return pytest.mark.sample(some)(pytest.mark.parametrize("key", keys)(test))

    return mark


def compare(name: str, key: str) -> None:
    assert list(differences(read_table(name)[key], make_row(name, key))) == []


@rows_of("models", 8)
def test_scaled_models(key: str) -> None:
    compare("models", key)


@rows_of("artifacts", 1)
def test_scaled_artifacts(key: str) -> None:
    compare("artifacts", key)


@rows_of("reports", 3)
def test_reports(key: str) -> None:
    compare("reports", key)


@rows_of("zoo", 8)
def test_outcomes_of_the_zoo(key: str) -> None:
    compare("zoo", key)


@rows_of("fresh", 8)
def test_outcomes_of_fresh_steps(key: str) -> None:
    compare("fresh", key)


@rows_of("unseen", 8)
def test_outcomes_of_the_unseen_steps(key: str) -> None:
    compare("unseen", key)


@rows_of("later", 8)
def test_outcomes_of_the_later_steps(key: str) -> None:
    compare("later", key)


@rows_of("examples", 8)
def test_outcomes_of_examples(key: str) -> None:
    compare("examples", key)


@rows_of("lint", 3)
def test_verdicts_on_scaled_models(key: str) -> None:
    compare("lint", key)


@rows_of("mutants", 4)
def test_verdicts_on_mutants(key: str) -> None:
    compare("mutants", key)


@rows_of("edits", 3)
def test_verdicts_on_random_edits(key: str) -> None:
    compare("edits", key)


def test_scaled_models_are_clean() -> None:
    """But for two targets, that refuse some models, verify accepts each; float16 gradients that leave are noticed."""
    rows = read_table("lint").items()
    noticed = {key: {found.partition(" ")[0] for found in row.get("lint", ())} for key, row in rows}
    assert all("refused" in row or row["verify"] == "accepted" for _, row in rows)
    assert all(
        codes == ({"GS608"} if "mlp_float16" in key and "refused" not in row else set())
        for (key, row), codes in zip(rows, noticed.values(), strict=True)
    )


def test_verify_notices_each_mutant() -> None:
    """Without the help of lint; there is a mutant of each kind of damage."""
    rows = read_table("mutants")
    assert all(rows[f"{kind.name} 1"]["mutant"] is not None for kind in KINDS)
    harmful = [row for row in rows.values() if row["mutant"] is not None and not row["harmless"]]
    assert len(harmful) > 500
    assert not [row for row in harmful if row["accepted"] or not {"match", "refused"} & {*row["by"]}]


@pytest.mark.parametrize("name", TABLES)
def test_each_table_is_whole(name: str) -> None:
    table = read_table(name)
    assert list(table) == sorted(TABLES[name].keys())
    assert (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").count("\n") == len(table)


def test_differences_name_the_field() -> None:
    before = {"a": 1, "b": ["x", "y"], "c": {"d": "e"}, "f": [1, 2], "same": 0}
    after = {"a": 2, "b": ["y", "z"], "c": {"d": "g"}, "f": [2, 1], "same": 0, "new": "h"}
    assert list(differences(before, after)) == [
        "a: - 1 + 2",
        'b: - ["x"] + ["z"]',
        "c.d: - e + g",
        "f: in another order",
        "new: - nothing + h",
    ]
    assert not list(differences(before, before))
