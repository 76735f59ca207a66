"""Names that options had in earlier releases: still accepted, with a hint on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from graphscale.errors import printable
from graphscale.process.streams import tell

__all__ = ["replace_old_names"]

_EDGE = {"--seed": "--seed-edge"}
_OLD = {
    "scale": _EDGE,
    "autocast": {**_EDGE, "--keep": "--keep-node"},
    "inspect": _EDGE,
    "train": {"--keep": "--keep-checkpoints"},
    "verify": {"--place": "--seed-edge", "--providers": "--provider"},
}


def replace_old_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the present names of options, and print a hint on those replaced."""
    names = _OLD.get(words[0], {}) if words else {}
    replaced: list[str] = []
    rest = iter(words)
    for word in rest:
        old, equals, value = word.partition("=")
        if old not in names or (not equals and (value := next(rest, "")) == ""):
            replaced.append(word)
        elif words[0] == "inspect" and value.lstrip("-").isdecimal():  # the seed of --check-gradients
            replaced += [old, value]
        else:
            replaced += _renamed(names[old], value)
            if not {"-q", "--quiet"} & {*words}:
                shown = printable(" ".join(_renamed(names[old], value)))
                tell(f"hint: the option {old} is called {names[old]} now: {shown}")
    return replaced


def _renamed(name: str, value: str) -> list[str]:
    values = value.split(",") if name == "--provider" else [value]
    return [word for each in values for word in (name, each.strip())]
