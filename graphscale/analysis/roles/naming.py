"""Evidence by names: one pattern turns the names of present values into those of next values.

Where `w1_next` and `b1_next` are outputs and `w1` and `b1` are inputs, `eta_next` is the next value of `eta`. Names
propose pairs and raise doubts, and complete names leave the pairs to elimination; a name alone makes no role certain.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.updates import ByType, Type, same_type, type_of

__all__ = ["common_start", "widest_pattern", "words_of"]

# A pattern in a name's beginning and end: the present ones, and the next ones.
_Pattern = tuple[str, str, str, str]
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
    by_name, neighbours = {value.name: value for value in holders}, _Neighbours(holders)
    found = Counter(pattern for output in shown[:_MOST_SHOWN] for pattern in neighbours.patterns(output))
    tried: list[tuple[int, int, dict[ir.Value, ir.Value]]] = []
    for pattern, _ in found.most_common(_MOST_PATTERNS):
        length = sum(map(len, pattern))
        if any(count == len(shown) and -length <= shortness for count, shortness, _ in tried):
            continue  # it names no more pairs
        named = {o: by_name.get(_present_name(o.name or "", pattern)) for o in outputs}
        pairs = {o: v for o, v in named.items() if v is not None and v is not o and same_type(o, v)}
        count = sum(output in pairs for output in shown)
        is_extension = not any(pattern[::2]) or not any(pattern[1::2])
        if count > 1 or (count and is_extension):
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
        self._names: dict[tuple[Type, int], list[list[str]]] = {}

    def patterns(self, output: ir.Value) -> Iterator[_Pattern]:
        """Yield the exchanges of an end, or of a beginning, that turn a name into an output's; a stem has a letter."""
        for order in (1, -1):
            new, names = words_of(output.name or "")[::order], self._sorted(output, order)
            place = bisect.bisect(names, new)
            for old in names[max(place - _MOST_NEAR, 0) : place + _MOST_NEAR]:
                stem = common_start(old, new)
                if not any(map(str.isalpha, stem)):
                    continue
                before, after = ("".join(words[len(stem) :][::order]) for words in (old, new))
                if (before or after) and not (before.isdigit() or after.isdigit()):
                    yield (before, after, "", "") if order < 0 else ("", "", before, after)

    def _sorted(self, output: ir.Value, order: int) -> list[list[str]]:
        kind = type_of(output), order
        if kind not in self._names:
            self._names[kind] = sorted(words_of(value.name or "")[::order] for value in self._holders.like(output))
        return self._names[kind]


def _present_name(following: str, pattern: _Pattern) -> str | None:
    """Return the name of the present value for that of a next value, None where a pattern does not fit it."""
    old_start, new_start, old_end, new_end = pattern
    if not (following.startswith(new_start) and following.endswith(new_end)):
        return None
    return old_start + following[len(new_start) : len(following) - len(new_end)] + old_end


def words_of(name: str) -> list[str]:
    """Return the words, numbers and separators of a name."""
    return re.findall(r"[^\W\d_]+|\d+|[\W_]+", name)


def common_start(one: list[str], other: list[str]) -> list[str]:
    """Return the common first words of two names."""
    length = 0
    for word, same in zip(one, other, strict=False):
        if word != same:
            break
        length += 1
    return one[:length]
