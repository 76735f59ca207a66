"""Layered drawing: the order within each layer by barycenters, and positions that keep long links straight.

After Sugiyama, Tagawa and Toda (1981): a link over several layers gets a bend in each, and the sweeps go over the
layers up and down. Positions under minimal distances are an isotonic regression, solved exactly by pooling adjacent
violators in linear time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Layering", "arrange"]

_SWEEPS = 10
# A bend is kept straight rather than a node centred.
_BEND_WEIGHT = 2.0
_BEND_SIZE = 6.0


@dataclasses.dataclass(frozen=True)
class Layering:
    """Positions along the layers.

    Attributes:
        positions: the position of each item within its layer.
        bends: for each link over several layers, the `(layer, position)` of its bends, from the source on.
    """

    positions: dict[int, float]
    bends: dict[tuple[int, int], list[tuple[int, float]]]


def arrange(
    layers: Mapping[int, int],
    links: Iterable[tuple[int, int]],
    sizes: Mapping[int, float],
    gap: float,
    wishes: Mapping[int, tuple[float, float]],
) -> Layering:
    """Order the items of each layer and place them.

    Args:
        layers: the layer of each item.
        links: `(source, target)` pairs; those within one layer have no effect.
        sizes: the extent of each item along its layer.
        gap: the distance between two items at least.
        wishes: `(position, weight)`: where some items would like to be.
    """
    grid = _Grid(layers, links, sizes, gap, wishes)
    for sweep in range(_SWEEPS):
        grid.sweep(downwards=sweep % 2 == 0, both=sweep >= _SWEEPS // 2)
    for _ in range(4):
        grid.settle()
    return Layering({item: grid.at[item] for item in layers}, grid.bends())


class _Grid:
    """Items and bends in their layers. Bends are numbered from the items' highest number on."""

    def __init__(
        self,
        layers: Mapping[int, int],
        links: Iterable[tuple[int, int]],
        sizes: Mapping[int, float],
        gap: float,
        wishes: Mapping[int, tuple[float, float]],
    ) -> None:
        self.layer = dict(layers)
        self.size = dict(sizes)
        self.gap = gap
        self.wishes = wishes
        self._next = self.first_bend = max(layers, default=0) + 1
        self._chains: dict[tuple[int, int], list[int]] = {}
        self.above: dict[int, list[int]] = defaultdict(list)
        self.below: dict[int, list[int]] = defaultdict(list)
        self._bends: dict[tuple[int, int], int] = {}
        for source, target in sorted(set(links), key=lambda link: abs(layers[link[1]] - layers[link[0]])):
            self._connect(source, target)
        self.rows: list[list[int]] = [[] for _ in range(max(self.layer.values(), default=0) + 1)]
        self.at: dict[int, float] = {}
        for vertex, layer in self.layer.items():
            self.rows[layer].append(vertex)
        for row in self.rows:
            self._pack(row, [self.wishes.get(vertex, (0.0, 0.0))[0] for vertex in row])

    def _connect(self, source: int, target: int) -> None:
        """Link two items, by bends that all links of one source share."""
        first, last = self.layer[source], self.layer[target]
        step = 1 if last > first else -1
        chain, previous = [], source
        for layer in range(first + step, last, step):
            bend = self._bends.get((source, layer))
            if bend is None:
                bend, self._next = self._next, self._next + 1
                self._bends[source, layer] = bend
                self.layer[bend], self.size[bend] = layer, _BEND_SIZE
                self._tie(previous, bend)
            chain.append(bend)
            previous = bend
        if first != last:
            self._tie(previous, target)
        self._chains[source, target] = chain

    def _tie(self, one: int, other: int) -> None:
        upper, lower = (one, other) if self.layer[one] < self.layer[other] else (other, one)
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def bends(self) -> dict[tuple[int, int], list[tuple[int, float]]]:
        return {link: [(self.layer[bend], self.at[bend]) for bend in chain] for link, chain in self._chains.items()}

    def sweep(self, downwards: bool, both: bool) -> None:
        """Order each layer by where its neighbours are."""
        for row in self.rows if downwards else reversed(self.rows):
            desired = {vertex: self._desired(vertex, downwards, both)[0] for vertex in row}
            row.sort(key=desired.__getitem__)
            self._pack(row, [desired[vertex] for vertex in row])

    def settle(self) -> None:
        """Improve the positions without changing the order."""
        for rows in (self.rows, self.rows[::-1]):
            for row in rows:
                wanted = [self._desired(vertex, True, True) for vertex in row]
                self._pack(row, [position for position, _ in wanted], [weight for _, weight in wanted])

    def _desired(self, vertex: int, downwards: bool, both: bool) -> tuple[float, float]:
        first, second = (self.above, self.below) if downwards else (self.below, self.above)
        near = first[vertex] or second[vertex]
        if both:
            near = [*first[vertex], *second[vertex]]
        weights = [self._weight(vertex, other) for other in near]
        total = sum(weights)
        position = sum(self.at[other] * weight for other, weight in zip(near, weights, strict=True))
        if vertex in self.wishes:
            wish, weight = self.wishes[vertex]
            position, total = position + wish * weight, total + weight
        if total == 0:
            return self.at[vertex], 0.1
        return position / total, total

    def _weight(self, one: int, other: int) -> float:
        return 1.0 + _BEND_WEIGHT * ((one >= self.first_bend) + (other >= self.first_bend))

    def _pack(self, row: Sequence[int], desired: Sequence[float], weights: Sequence[float] | None = None) -> None:
        """Put a layer's vertices, in this order, as near to where they want to be as the distances allow."""
        offsets, offset = [], 0.0
        for i, vertex in enumerate(row):
            if i > 0:
                previous = row[i - 1]
                near_bend = previous >= self.first_bend or vertex >= self.first_bend
                offset += (self.size[previous] + self.size[vertex]) / 2 + (self.gap / 2 if near_bend else self.gap)
            offsets.append(offset)
        free = _isotonic([d - o for d, o in zip(desired, offsets, strict=True)], weights or [1.0] * len(row))
        self.at.update((vertex, f + o) for vertex, f, o in zip(row, free, offsets, strict=True))


def _isotonic(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to one, in weighted least squares: pool adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(wanted, weights, strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, more, size = blocks.pop()
            mean = (mean * total + other * more) / (total + more)
            total, count = total + more, count + size
        blocks.append((mean, total, count))
    return [mean for mean, _, count in blocks for _ in range(count)]
