"""The lists of mixed precision, and a user's changes: operators by name, nodes by name, a file of lists."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx

from graphscale.errors import AutocastError
from graphscale.files.contents import parse_json
from graphscale.files.reading import read_file
from graphscale.operators import MICROSOFT, OPERATORS, CastRule, Colour

__all__ = ["Settings", "default_rules", "make_settings"]

_FIELDS = tuple(colour.value for colour in Colour)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The lists of autocast.

    Attributes:
        rules: the rule of each operator, by domain and name.
        keep: the names of nodes that stay float32.
    """

    rules: Mapping[tuple[str, str], CastRule]
    keep: frozenset[str]

    def to_lists(self) -> dict[str, list[str]]:
        """Return the changes of the default lists, for `make_settings`: `{"allow": [...], ...}`."""
        default, lists = default_rules(), dict[str, list[str]]()
        for (domain, op_type), rule in self.rules.items():
            if default.get((domain, op_type)) != rule:
                lists.setdefault(rule.colour.value, []).append(f"{domain or 'ai.onnx'}::{op_type}")
        return {**lists, "keep": sorted(self.keep)} if self.keep else lists


def default_rules() -> dict[tuple[str, str], CastRule]:
    """Return the rule of each known operator, by domain and name; an operator without one is denied."""
    return {key: operator.casting for key, operator in OPERATORS.items() if operator.casting is not None}


def make_settings(
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    keep: Iterable[str] = (),
    lists: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Settings:
    """Change the lists.

    Args:
        allow: operators for the allow list: a name, or `domain::name`.
        deny: operators for the deny list.
        keep: the names of nodes that stay float32.
        lists: `{"allow": [...], "infer": [...], "clear": [...], "deny": [...], "keep": [...]}` or the path of a JSON
            file that holds it; the other arguments come on top.

    Raises:
        AutocastError: an operator is unknown or on two lists, or the file has another form.
    """
    rules = default_rules()
    chosen, nodes = _read(lists)
    allowed, denied, kept = (_names(name, value) for name, value in (("allow", allow), ("deny", deny), ("keep", keep)))
    found = [[_find_operator(name, rules) for name in names] for names in (allowed, denied)]
    chosen |= dict.fromkeys(found[0], Colour.ALLOW) | dict.fromkeys(found[1], Colour.DENY)
    both = set(found[0]).intersection(found[1])
    if both:
        raise AutocastError(f"{'::'.join(filter(None, min(both)))} is to be allowed and denied; choose one")
    for operator, colour in chosen.items():
        old = rules.get(operator, CastRule(colour))
        reason = "on the user's deny list" if colour is Colour.DENY else ""
        rules[operator] = dataclasses.replace(old, colour=colour, reason=reason)
    return Settings(rules, frozenset(kept) | nodes)


def _names(field: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise AutocastError(f"{field} takes a list of names; got {names!r}")
    listed = tuple(names)
    if not all(isinstance(name, str) and name for name in listed):
        raise AutocastError(f"{field} takes names; got {next(n for n in listed if not (isinstance(n, str) and n))!r}")
    return listed


def _read(
    lists: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> tuple[dict[tuple[str, str], Colour], frozenset[str]]:
    if lists is None:
        return {}, frozenset()
    source = "the lists" if isinstance(lists, Mapping) else str(lists)
    if not isinstance(lists, Mapping | str | os.PathLike):
        raise AutocastError(f"lists are a mapping or the path of a JSON file; got {lists!r}")
    content = lists if isinstance(lists, Mapping) else _parse(Path(lists))
    if not isinstance(content, Mapping):
        raise AutocastError(f'{source} must be an object: {{"allow": [...], "deny": [...], ...}}')
    colours: dict[tuple[str, str], Colour] = {}
    rules = default_rules()
    for field, names in content.items():
        if field not in (*_FIELDS, "keep"):
            raise AutocastError(f"{source}: there is no list {field!r}; the lists are {', '.join(_FIELDS)} and keep")
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise AutocastError(f"{source}: {field!r} must be a list of names")
        for name in names if field != "keep" else ():
            try:
                operator = _find_operator(name, rules)
            except AutocastError as error:
                raise AutocastError(f"{source}: {error}") from error
            if operator in colours and colours[operator] is not Colour(field):
                raise AutocastError(f"{source}: {name} is on two lists, {colours[operator].value} and {field}")
            colours[operator] = Colour(field)
    return colours, frozenset(content.get("keep", ()))


def _parse(path: Path) -> Any:
    try:
        return parse_json(read_file(path))
    except OSError as error:
        raise AutocastError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise AutocastError(f"{path} is not JSON: {error}") from error


def _find_operator(name: str, rules: Mapping[tuple[str, str], CastRule]) -> tuple[str, str]:
    """Return the domain and name of an operator that graphscale or ONNX knows."""
    domain, separator, op_type = name.rpartition("::")
    for candidate in ("" if domain == "ai.onnx" else domain,) if separator else ("", MICROSOFT):
        is_foreign = candidate not in ("", MICROSOFT)
        is_text = op_type.isprintable()  # for half a character ONNX raises a TypeError
        if is_foreign or (candidate, op_type) in rules or (candidate == "" and is_text and onnx.defs.has(op_type)):
            return candidate, op_type
    names = sorted({op for _, op in rules} | {schema.name for schema in onnx.defs.get_all_schemas()})
    alike = [known for known in names if known.lower() == op_type.lower()]
    close = alike or difflib.get_close_matches(op_type, names)
    hint = f"; did you mean {close[0]}?" if close else "; pass it as DOMAIN::NAME if it is your own"
    raise AutocastError(f"there is no operator {name!r}{hint}")
