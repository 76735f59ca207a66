"""Evidence by names: one pattern turns the names of present values into those of next values.

Where `w1_next` and `b1_next` are outputs and `w1` and `b1` are inputs, `eta_next` is the next value of `eta`. Names
propose pairs and raise doubts; a name alone makes no role certain.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

import onnx_ir as ir

__all__ = ["likeness", "widest_pattern"]

# A pattern in a name's beginning and end: the present ones, and the next ones.
_Pattern = tuple[str, str, str, str]
# Limits of the outputs that show patterns, and of the patterns that are tried on all outputs.
_MOST_SHOWN, _MOST_PATTERNS = 32, 32


def widest_pattern(
    candidates: Mapping[ir.Value, Collection[ir.Value]],
    shown: Collection[ir.Value],
    is_learnt: Callable[[ir.Value], bool],
) -> dict[ir.Value, ir.Value]:
    """Return the pairs of the pattern that names the most pairs; of equal ones, the most learnt, then the shortest.

    A single pair could be a coincidence, unless it is learnt, and one of its names is a part of the other.

    Args:
        candidates: for each output, the inputs whose next value it may be.
        shown: the outputs that may be next values, and so show the pattern.
        is_learnt: returns whether an output is moved by a gradient.
    """
    fitting = {output: {value.name: value for value in values} for output, values in candidates.items()}
    names = ((v or "", o.name or "") for o in [*shown][:_MOST_SHOWN] for v in fitting[o])
    found = Counter(pattern for old, new in names for pattern in _patterns(old, new))
    best: tuple[tuple[int, ...], dict[ir.Value, ir.Value]] = ((0,), {})
    for pattern, _ in found.most_common(_MOST_PATTERNS):
        named = {o: fitting[o].get(_present_name(o.name or "", pattern)) for o in candidates}
        pairs = {o: v for o, v in named.items() if v is not None and v is not o}
        counted = [o for o in shown if o in pairs]
        rank = (len(counted), sum(map(is_learnt, counted)), -sum(map(len, pattern)))
        is_extension = not any(pattern[::2]) or not any(pattern[1::2])
        if rank > best[0] and (len(counted) > 1 or is_extension):
            best = rank, pairs
    return best[1] if sum(best[0][:2]) > 1 else {}


def _patterns(present: str, following: str) -> Iterator[_Pattern]:
    """Yield the exchanges of an end, or of a beginning, that turn one name into another; a stem has a letter."""
    for at_end in (True, False):
        order = 1 if at_end else -1
        old, new = _words(present)[::order], _words(following)[::order]
        stem = _common(old, new)
        affixes = ["".join(words[len(stem) :][::order]) for words in (old, new)]
        if any(map(str.isalpha, stem)) and not any(map(str.isdigit, affixes)) and any(affixes):
            yield ("", "", affixes[0], affixes[1]) if at_end else (affixes[0], affixes[1], "", "")


def _present_name(following: str, pattern: _Pattern) -> str | None:
    """Return the name of the present value for that of a next value, None where a pattern does not fit it."""
    old_start, new_start, old_end, new_end = pattern
    if not (following.startswith(new_start) and following.endswith(new_end)):
        return None
    return old_start + following[len(new_start) : len(following) - len(new_end)] + old_end


def likeness(value: ir.Value, output: ir.Value) -> tuple[float, int]:
    """Return the part of an input's name at an end of an output's name, in words: as a share, and its length.

    Numbers alone have length 0.
    """
    name, other = _words(value.name or ""), _words(output.name or "")
    ends = (_common(name, other), _common(name[::-1], other[::-1]))
    common = max(sum(map(len, words)) if any(map(str.isalpha, words)) else 0 for words in ends)
    return common / max(sum(map(len, name)), 1), common


def _words(name: str) -> list[str]:
    """Return the words, numbers and separators of a name."""
    return re.findall(r"[^\W\d_]+|\d+|[\W_]+", name)


def _common(one: list[str], other: list[str]) -> list[str]:
    """Return the common first words of two names."""
    return [word for word, same in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
