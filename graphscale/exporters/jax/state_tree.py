"""Trees of arrays by name: the state of a step, and its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from graphscale.errors import ExportError

__all__ = ["Leaf", "Tree"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a tree.

    Attributes:
        name: its path, as `params.dense.kernel`.
        value: the array; the words of a random key, `[..., 2]`.
        key: the implementation of the random key, None for an array of numbers.
        given: the dtype of the array that the user passed, None for another object.
    """

    name: str
    value: np.ndarray[Any, Any]
    key: Any = None
    given: Any = None

    def restore(self, value: Any) -> Any:
        """Return a value of this leaf as the step of the user has it."""
        return value if self.key is None else jax.random.wrap_key_data(value, impl=self.key)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree whose arrays have names.

    Attributes:
        leaves: its arrays.
        structure: the tree around all leaves, the fixed ones as well.
        fixed: leaves that are no arrays by their position: functions, texts, flags.
    """

    leaves: tuple[Leaf, ...]
    structure: Any
    fixed: dict[int, Any]

    @classmethod
    def make(cls, tree: Any, alone: str, taken: Sequence[str] = ()) -> Tree:
        """Name the arrays of a tree.

        A name joins the keys, fields and attributes of a path by points, without its positions in tuples, where that
        tells all arrays apart.

        Args:
            tree: nested containers of arrays.
            alone: the name of an array without a path, and the prefix of names that are taken.
            taken: names of another tree.
        """
        paths, structure = jax.tree.flatten_with_path(tree)
        # As equinox.filter_jit: beside functions, plain numbers belong to the code.
        is_code = any(not _is_array(value) and not isinstance(value, int | float) for _, value in paths)
        fixed = {
            at: value
            for at, (_, value) in enumerate(paths)
            if not _is_array(value) and (is_code or isinstance(value, bool | str))
        }
        used = [path for at, (path, _) in enumerate(paths) if at not in fixed]
        names = _name_paths(used, alone, set(taken))
        values = [value for at, (_, value) in enumerate(paths) if at not in fixed]
        return cls(tuple(map(_make_leaf, names, values)), structure, fixed)

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        return [leaf.name for leaf in self.leaves]

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays by name."""
        return {leaf.name: leaf.value for leaf in self.leaves}

    def build(self, values: Sequence[Any]) -> Any:
        """Return the tree with other arrays."""
        left = iter(leaf.restore(value) for leaf, value in zip(self.leaves, values, strict=True))
        count = len(self.leaves) + len(self.fixed)
        return jax.tree.unflatten(
            self.structure, [self.fixed[at] if at in self.fixed else next(left) for at in range(count)]
        )

    def take_apart(self, tree: Any) -> list[Any]:
        """Return the arrays of a tree of the same structure; random keys as words.

        Raises:
            ExportError: it has another structure.
        """
        values, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ExportError(
                "the step returns a state of another structure than it takes: return (new state, loss), with the new "
                "state in the containers of the old one"
            )
        return [words(value) for at, value in enumerate(values) if at not in self.fixed]


def words(value: Any) -> Any:
    """Return the words of random keys; other values unchanged."""
    return jax.random.key_data(value) if _is_key(value) else value


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _make_leaf(name: str, value: Any) -> Leaf:
    if _is_key(value):
        return Leaf(name, np.asarray(jax.random.key_data(value)), jax.random.key_impl(value))
    try:
        array = np.asarray(jax.numpy.asarray(value))
    except (TypeError, ValueError) as error:
        raise ExportError(f"{name} is a {type(value).__name__}, which is no array") from error
    return Leaf(name, array, given=getattr(value, "dtype", None))


def _name_paths(paths: Sequence[Any], alone: str, taken: set[str]) -> list[str]:
    short = [_join(path, alone, positions=False) for path in paths]
    full = [_join(path, alone, positions=True) for path in paths]
    names = [name if short.count(name) == 1 else longer for name, longer in zip(short, full, strict=True)]
    return [f"{alone}.{name}" if name in taken else name for name in names]


def _join(path: Any, alone: str, *, positions: bool) -> str:
    parts = []
    for entry in path:
        if isinstance(entry, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey):
            parts += [str(getattr(entry, "idx", getattr(entry, "key", "")))] if positions else []
        elif isinstance(entry, jax.tree_util.DictKey):
            parts.append(str(entry.key))
        else:
            parts.append(str(getattr(entry, "name", entry)))
    return ".".join(parts) or alone
