"""Results in a few lines: text in a terminal, a table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from graphscale.errors import printable

__all__ = ["Row", "Summary", "few"]

Row = tuple[str, object]
_LONGEST = 110
# Inherited colours, and lines of a half-transparent grey: they fit a light and a dark notebook.
_TABLE = "border-collapse:collapse;font-size:13px;color:inherit;background:transparent"
_CELL = "text-align:left;vertical-align:top;padding:3px 14px 3px 0;border-top:1px solid rgba(128,128,128,.35)"
_NAME = f"{_CELL};font-weight:600;white-space:nowrap;color:inherit;background:transparent"
_TEXT = f"{_CELL};overflow-wrap:anywhere;color:inherit;background:transparent"


class Summary:
    """A result that shows itself by a line and a short table, as text or as HTML. Names in it come from files."""

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        """Return the first line, behind the name of the class, and the rows of a table: few, and known without work."""
        raise NotImplementedError

    def __repr__(self) -> str:
        head, rows = self._lines()
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        """Return the table for a notebook, all texts escaped."""
        head, rows = self._lines()
        body = (
            f'<tr style="background:transparent"><th scope="row" style="{_NAME}">{escape(name)}</th>'
            f'<td style="{_TEXT}">{escape(text)}</td></tr>'
            for name, text in rows
        )
        caption = '<caption style="caption-side:top;text-align:left;padding:4px 0;font-weight:600;color:inherit">'
        return f'<table style="{_TABLE}">{caption}{escape(head)}</caption><tbody>{"".join(body)}</tbody></table>'

    def _lines(self) -> tuple[str, list[tuple[str, str]]]:
        line, rows = self._summarize()
        return _clean(f"{type(self).__name__}: {line}"), [(_clean(name), _clean(text)) for name, text in rows]


def few(texts: Sequence[object], most: int = 4) -> str:
    """Join the first of many texts by commas, with the number of the others."""
    first = ", ".join(map(str, texts[:most])) or "none"
    return first if len(texts) <= most else f"{first} and {len(texts) - most} more"


def _clean(text: object) -> str:
    line = printable(text)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
