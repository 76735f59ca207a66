"""Write the parts of docs/lint that come from the table of codes: the index, and the head of each page.

    python docs/lint_pages.py

The graphs before and after on each page are written by hand, and run by tests/checks/linting/test_pages.py.
"""

from __future__ import annotations

from pathlib import Path

from graphscale.checks.linting.codes import CODES, GROUPS, Code

__all__ = ["FOLDER", "heading", "index", "with_heading"]

FOLDER = Path(__file__).resolve().parent / "lint"
_BEGIN = "\n## Before\n"


def heading(code: Code) -> str:
    """Return the head of a code's page, from the table."""
    return (
        f"# {code.code}: {code.title}\n\n"
        f"Severity: **{code.severity}**. Name: `{code.name}`.\n\n"
        f"## Why it matters\n\n{code.why}\n\n"
        f"## The fix\n\n{code.fix}\n"
    )


def with_heading(code: Code, page: str) -> str:
    """Return a page with its head as the table has it."""
    return heading(code) + page[page.index(_BEGIN) :]


def index() -> str:
    """Return the page that lists all codes."""
    lines = [
        "# Lint",
        "",
        "`graphscale lint MODEL` looks for mistakes in the loss scaling of any training graph: scaled by graphscale, "
        "scaled by hand, or without a loss scale. It runs nothing, reads no weights, and needs time linear in the size "
        "of the graph.",
        "",
        "```bash",
        "graphscale lint models/pytorch/mse_tanh.onnx",
        "```",
        "",
        "The exit code is 0 without findings, or with notes alone; 1 with an error or a warning; 2 if the "
        "file is no model, or an inference graph. `--json` prints the findings as data, "
        "`--sarif FILE` writes them for a CI system, "
        "`--select GS3` and `--ignore GS606` choose codes by their first characters. In a graph scaled by hand, lint "
        "recognizes the loss scale by its effect; `--scale NAME` names it.",
        "",
        "From Python: `graphscale.lint(model).findings`.",
    ]
    for digit, group in GROUPS.items():
        lines += ["", f"## {group}", "", "| code | severity | what is wrong |", "|---|---|---|"]
        lines += [
            f"| [{code.code}]({code.code}.md) | {code.severity} | {code.title} |"
            for code in CODES.values()
            if code.code[2] == digit
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the index and the heads of all pages."""
    (FOLDER / "index.md").write_text(index(), encoding="utf-8")
    for code in CODES.values():
        path = FOLDER / f"{code.code}.md"
        path.write_text(with_heading(code, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
