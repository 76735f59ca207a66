"""Layered drawing: the order within each layer by barycenters, and positions that keep long links straight.

After Sugiyama, Tagawa and Toda (1981): a link over several layers gets a bend in each, and the sweeps go over the
layers up and down. Positions under minimal distances are an isotonic regression, solved exactly by pooling adjacent
violators in linear time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

__all__ = ["Layering"]

_SWEEPS = 10
# A bend is kept straight rather than a node centred.
_BEND_WEIGHT = 2.0
_BEND_SIZE = 6.0


class Layering:
    """The items of each layer in order, with positions. Bends are numbered from the items' highest number on.

    Args:
        layers: the layer of each item.
        links: `(source, target)` pairs; those within one layer have no effect.
        sizes: the extent of each item along its layer.
        gap: the distance between two items at least.
        wishes: `(position, weight)`: the preferred positions of some items.

    Attributes:
        positions: the position of each item, and of each bend, within its layer.
        bends: for each link over several layers, the `(layer, position)` of its bends, from the source on.
    """

    def __init__(
        self,
        layers: Mapping[int, int],
        links: Iterable[tuple[int, int]],
        sizes: Mapping[int, float],
        gap: float,
        wishes: Mapping[int, tuple[float, float]],
    ) -> None:
        self._layer, self._size = dict(layers), dict(sizes)
        self._gap, self._wishes = gap, wishes
        self._next = self._first_bend = max(layers, default=0) + 1
        self._above: dict[int, list[int]] = defaultdict(list)
        self._below: dict[int, list[int]] = defaultdict(list)
        self._shared: dict[tuple[int, int], int] = {}
        ordered = sorted(set(links), key=lambda link: abs(layers[link[1]] - layers[link[0]]))
        chains = {(source, target): self._connect(source, target) for source, target in ordered}
        self._rows: list[list[int]] = [[] for _ in range(max(self._layer.values(), default=0) + 1)]
        self.positions: dict[int, float] = {}
        for vertex, layer in self._layer.items():
            self._rows[layer].append(vertex)
        for row in self._rows:
            self._pack(row, [wishes.get(vertex, (0.0, 0.0))[0] for vertex in row])
        for sweep in range(_SWEEPS):
            self._sweep(downwards=sweep % 2 == 0, both=sweep >= _SWEEPS // 2)
        for _ in range(4):
            self._settle()
        self.bends = {link: [(self._layer[b], self.positions[b]) for b in chain] for link, chain in chains.items()}

    def _connect(self, source: int, target: int) -> list[int]:
        """Link two items by bends that all links of one source share; return the bends."""
        first, last = self._layer[source], self._layer[target]
        step = 1 if last > first else -1
        chain, previous = [], source
        for layer in range(first + step, last, step):
            bend = self._shared.get((source, layer))
            if bend is None:
                bend, self._next = self._next, self._next + 1
                self._shared[source, layer] = bend
                self._layer[bend], self._size[bend] = layer, _BEND_SIZE
                self._tie(previous, bend)
            chain.append(bend)
            previous = bend
        if first != last:
            self._tie(previous, target)
        return chain

    def _tie(self, one: int, other: int) -> None:
        upper, lower = (one, other) if self._layer[one] < self._layer[other] else (other, one)
        self._below[upper].append(lower)
        self._above[lower].append(upper)

    def _sweep(self, downwards: bool, both: bool) -> None:
        """Order each layer by where its neighbours are."""
        for row in self._rows if downwards else reversed(self._rows):
            desired = {vertex: self._desired(vertex, downwards, both)[0] for vertex in row}
            row.sort(key=desired.__getitem__)
            self._pack(row, [desired[vertex] for vertex in row])

    def _settle(self) -> None:
        """Improve the positions without changing the order."""
        for rows in (self._rows, self._rows[::-1]):
            for row in rows:
                wanted = [self._desired(vertex, True, True) for vertex in row]
                self._pack(row, [position for position, _ in wanted], [weight for _, weight in wanted])

    def _desired(self, vertex: int, downwards: bool, both: bool) -> tuple[float, float]:
        first, second = (self._above, self._below) if downwards else (self._below, self._above)
        near = [*first[vertex], *second[vertex]] if both else first[vertex] or second[vertex]
        first_bend = self._first_bend
        weights = [1.0 + _BEND_WEIGHT * ((vertex >= first_bend) + (other >= first_bend)) for other in near]
        total = sum(weights)
        position = sum(self.positions[other] * weight for other, weight in zip(near, weights, strict=True))
        if vertex in self._wishes:
            wish, weight = self._wishes[vertex]
            position, total = position + wish * weight, total + weight
        if total == 0:
            return self.positions[vertex], 0.1
        return position / total, total

    def _pack(self, row: Sequence[int], desired: Sequence[float], weights: Sequence[float] | None = None) -> None:
        """Put a layer's vertices, in this order, as near to where they want to be as the distances allow."""
        offsets = [0.0]
        for one, other in pairwise(row):
            gap = self._gap / 2 if max(one, other) >= self._first_bend else self._gap
            offsets.append(offsets[-1] + ((self._size[one] + self._size[other]) / 2 + gap))
        free = _isotonic([d - o for d, o in zip(desired, offsets, strict=False)], weights or [1.0] * len(row))
        self.positions.update((vertex, f + o) for vertex, f, o in zip(row, free, offsets, strict=False))


def _isotonic(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to one, in weighted least squares: pool adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(wanted, weights, strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, more, size = blocks.pop()
            mean = (mean * total + other * more) / (total + more)
            total, count = total + more, count + size
        blocks.append((mean, total, count))
    return [mean for mean, _, count in blocks for _ in range(count)]
