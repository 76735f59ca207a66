"""Patterns of names that pair outputs with inputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphscale.errors import UpdateError

__all__ = ["expand_patterns"]

# The part of a pattern that stands for the common part of two names.
_STEM = "{}"


def expand_patterns(graph: ir.Graph, updates: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return pairs of names, with those that patterns name in place of the patterns, and the pattern of each of these.

    Single pairs come before patterns, and so does an output whose own name has the braces of a pattern.

    Raises:
        UpdateError: a pattern names no pair of an output and an input, or two patterns name different ones.
    """
    outputs = dict.fromkeys(value.name or "" for value in graph.outputs)
    others = {o: i for o, i in updates.items() if o not in outputs}
    patterns = {o: i for o, i in others.items() if str(o).count(_STEM) == str(i).count(_STEM) == 1}
    pairs, sources = {o: i for o, i in updates.items() if o not in patterns}, dict[str, str]()
    inputs = {value.name for value in (*graph.inputs, *graph.initializers.values())} if patterns else set()
    for pattern, source in patterns.items():
        option, (start, _, end) = f"--update {pattern}={source}", pattern.partition(_STEM)
        fitting = [o for o in outputs if o.startswith(start) and o.endswith(end) and len(o) > len(start) + len(end)]
        named = {o: source.replace(_STEM, o[len(start) : len(o) - len(end)]) for o in fitting}
        named = {output: name for output, name in named.items() if name in inputs and name != output}
        if not named:
            raise UpdateError(f"{option}: the pattern names no output together with an input")
        for output, name in named.items():
            if output not in updates and pairs.setdefault(output, name) != name:
                raise UpdateError(f"{option} {output}={name}: {sources[output]} pairs it with {pairs[output]!r}")
            sources.setdefault(output, option)
    return pairs, {output: option for output, option in sources.items() if output not in updates}
