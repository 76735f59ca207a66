"""Evidence by names: one pattern turns the names of present values into those of next values.

Where `w1_next` and `b1_next` are outputs and `w1` and `b1` are inputs, `eta_next` is the next value of `eta`. Names
propose pairs and raise doubts, and complete names leave the pairs to elimination; a name alone makes no role certain.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.updates import ByType, Type, same_type, type_of

__all__ = ["find_present", "likeness", "widest_pattern"]

_NEXT = frozenset(("next", "new", "updated"))

_SEPARATORS = re.compile(r"[\W_]+")
_CAPITALS = re.compile(r"(?<=[^\W_])(?=[A-Z])")
_WORDS = re.compile(r"[^\W\d_]+|\d+|[\W_]+")
# The place in a name, 1 for its end, -1 for its beginning, 0 for anywhere; the present words; the next ones.
_Pattern = tuple[int, str, str]
# Limits of the outputs that show patterns, of the names on either side of each, and of the patterns for all outputs.
_MOST_SHOWN, _MOST_NEAR, _MOST_PATTERNS = 32, 8, 32


def widest_pattern(
    outputs: Collection[ir.Value],
    holders: Collection[ir.Value],
    shown: Sequence[ir.Value],
    is_learnt: Callable[[ir.Value], bool],
) -> dict[ir.Value, ir.Value]:
    """Return the pairs of the pattern that names the most pairs; of equal ones, the most learnt, then the shortest.

    A single pair could be a coincidence, unless it is learnt, and one of its names is a part of the other.

    Args:
        outputs: the outputs; each may have a pair.
        holders: the inputs and initializers that may hold state.
        shown: the outputs that may be next values, and so show the pattern.
        is_learnt: returns whether an output is moved by a gradient.
    """
    by_name, neighbours = defaultdict[str, list[ir.Value]](list), _Neighbours(holders)
    for value in holders:
        by_name[_plain(value)].append(value)
    plain = [(output, _plain(output)) for output in outputs]
    found = Counter(pattern for output in shown[:_MOST_SHOWN] for pattern in neighbours.patterns(output))
    tried: list[tuple[int, int, dict[ir.Value, ir.Value]]] = []
    for pattern, _ in found.most_common(_MOST_PATTERNS):
        length = sum(map(len, pattern[1:]))
        if any(count == len(shown) and -length <= shortness for count, shortness, _ in tried):
            continue  # it names no more pairs
        named = ((o, _like(o, by_name[name])) for o, text in plain for name in _present_names(text, pattern))
        pairs = {o: v for o, v in named if v is not None}
        count = sum(output in pairs for output in shown)
        if count > 1 or (count and not all(pattern[1:])):
            tried.append((count, -length, pairs))
    most = max((count for count, _, _ in tried), default=0)
    widest = [each for each in tried if each[0] == most]
    if len(widest) == 1 < most:
        return widest[0][2]
    ranks = [(sum(is_learnt(o) for o in shown if o in pairs), shortness) for _, shortness, pairs in widest]
    best = max(range(len(ranks)), key=ranks.__getitem__, default=0)
    return widest[best][2] if ranks and most + ranks[best][0] > 1 else {}


class _Neighbours:
    """The names of present values in order, from the first word to the last, and from the last to the first."""

    def __init__(self, holders: Iterable[ir.Value]) -> None:
        self._holders = ByType(holders)
        self._names: dict[Type, dict[int, list[list[str]]]] = {}

    def patterns(self, output: ir.Value) -> Iterator[_Pattern]:
        """Yield the exchanges of an end, of a beginning, or of words within, for an output's name.

        The rest of the name has a letter.
        """
        for order in (1, -1):
            new, names = words_of(_plain(output))[::order], self._sorted(output)[order]
            place = bisect.bisect(names, new)
            near = names[max(place - _MOST_NEAR, 0) : place + _MOST_NEAR]
            stems = [common_start(old, new) for old in near]
            common = [sum(map(str.isalnum, stem)) for stem in stems]
            for old, stem, count in zip(near, stems, common, strict=True):
                if count < max(common) or not any(map(str.isalpha, stem)):
                    continue
                rests = old[len(stem) :], new[len(stem) :]
                before, after = ("".join(words[::order]) for words in rests)
                if (before or after) and not (before.isdigit() or after.isdigit()):
                    yield order, before, after
                if rests[0] and order > 0 and after.endswith(before):
                    inserted = after.removesuffix(before)
                    if stem[-1] == "." and inserted.endswith("."):
                        inserted = "." + inserted[:-1]  # as at the end of a name
                    if any(map(str.isalpha, inserted)):
                        yield 0, "", inserted

    def _sorted(self, output: ir.Value) -> dict[int, list[list[str]]]:
        kind = type_of(output)
        if kind not in self._names:
            names = [words_of(_plain(value)) for value in self._holders.like(output)]
            self._names[kind] = {order: sorted(words[::order] for words in names) for order in (1, -1)}
        return self._names[kind]


def _present_names(following: str, pattern: _Pattern) -> Iterator[str]:
    """Yield the names that the present value may have, for that of a next value; none where a pattern does not fit."""
    order, old, new = pattern
    start = following.find(new)
    while start >= 0:
        end = start + len(new)
        if not ((order < 0 and start) or (order > 0 and end < len(following))):
            yield following[:start] + old + following[end:]
        start = following.find(new, max(end, start + 1))


def _like(output: ir.Value, holders: Sequence[ir.Value]) -> ir.Value | None:
    """Return the one holder of an output's type; of several with names that differ in case, the one spelled alike."""
    found = [value for value in holders if value is not output and same_type(output, value)]
    if len(found) > 1:
        found = [value for value in found if (value.name or "") in (output.name or "")]
    return found[0] if len(found) == 1 else None


def _plain(value: ir.Value) -> str:
    """Return the words of a name with one separator between them, for names of any style.

    Exporters and libraries join words by several signs, or begin each with a capital letter.
    """
    return _SEPARATORS.sub(".", _CAPITALS.sub(".", value.name or "")).lower()


def words_of(name: str) -> list[str]:
    """Return the words, numbers and separators of a name."""
    return _WORDS.findall(name)


def find_present(output: ir.Value, values: Iterable[ir.Value]) -> ir.Value | None:
    """Find the value whose next one an output is named as, by a word for that: `w_next`, `newW`."""
    words = [word for word in words_of(_plain(output)) if word.isalnum()]
    present = [word for word in words if word not in _NEXT]
    named = values if len(present) < len(words) else ()
    return next((v for v in named if [w for w in words_of(_plain(v)) if w.isalnum()] == present), None)


def common_start(one: list[str], other: list[str]) -> list[str]:
    """Return the common first words of two names."""
    length = 0
    for word, same in zip(one, other, strict=False):
        if word != same:
            break
        length += 1
    return one[:length]


def likeness(value: ir.Value, output: ir.Value) -> tuple[float, int]:
    """Return the part of an input's name at an end of an output's name, in words: as a share, and its length.

    Numbers alone have length 0.
    """
    name, other = words_of(_plain(value)), words_of(_plain(output))
    ends = (common_start(name, other), common_start(name[::-1], other[::-1]))
    common = max(sum(map(len, words)) if any(map(str.isalpha, words)) else 0 for words in ends)
    return common / max(sum(map(len, name)), 1), common
