"""Python values that a step reads and changes: attributes, closures, globals. A graph keeps those of its export."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.process.summary import few

__all__ = ["JUMPS", "PythonValue", "Values", "changed", "names_of", "notes_on", "read_values", "restore"]

# Numbers of calls after which a counter of calls is tried: round ones, and those before, for a counter is often
# raised first.
JUMPS = tuple(count for power in (10, 100, 1000, 10_000, 100_000, 1_000_000) for count in (power - 1, power))
_LIBRARIES = tuple(Path(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib"))
# Longer containers count by their length alone.
_LONGEST = 10_000


@dataclasses.dataclass(frozen=True)
class PythonValue:
    """A value of Python.

    Attributes:
        name: the place as its user knows it, such as `block.calls`.
        kind: number, value, tensor or generator.
        value: the value, or a form of it that can be compared.
        put: assigns another value; None where that is not possible.
    """

    name: str
    kind: str
    value: Any
    put: Callable[[Any], None] | None = dataclasses.field(default=None, compare=False)


Values = dict[tuple[Any, ...], PythonValue]


def read_values(roots: Mapping[str, Any], children: Callable[[Any], Mapping[str, Any] | None]) -> Values:
    """Read all values that can be reached from some objects.

    These are attributes of objects and of their classes, containers, and the variables of functions: closures,
    defaults, and the globals that they name. Classes and functions of libraries are left out.

    Args:
        roots: the objects by name; a name of "" is left out of the names of their attributes.
        children: returns the attributes of a framework's own objects; None for any other object.
    """
    reader = _Reader(children)
    for name, root in roots.items():
        reader.read(name, root, (name,), None)
    return reader.found


def changed(before: Values, after: Values) -> list[PythonValue]:
    """Return the later form of the values that differ, and of those that are gone the earlier one."""
    found = []
    for key in dict.fromkeys((*before, *after)):
        pair = [values[key] for values in (after, before) if key in values]
        if len(pair) < 2 or pair[0] != pair[1]:
            # A cache of tensors begins as None.
            kind = "tensor" if "tensor" in (each.kind for each in pair) else pair[0].kind
            found.append(dataclasses.replace(pair[0], kind=kind))
    return found


def names_of(values: Iterable[PythonValue]) -> str:
    """Return the names of values, for a message."""
    return few(list(dict.fromkeys(each.name for each in values)))


def notes_on(before: Values, after: Values) -> list[str]:
    """Return the note for a user on values that a call changed, tensors aside; none if there are none."""
    values = [each for each in changed(before, after) if each.kind != "tensor"]
    if not values:
        return []
    return [
        f"each call changes {names_of(values)} in Python; the graph keeps the decisions that the export made by them"
    ]


def restore(before: Values, now: Values) -> None:
    """Put numbers and other plain values back that differ."""
    for key, each in before.items():
        if each.put is not None and now.get(key) != each:
            each.put(each.value)


class _Same:
    """A tensor, equal to itself until it is written."""

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._version = tensor, getattr(tensor, "_version", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._tensor is other._tensor and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


# The name of a part, the part, its place, and its assignment. A place of two is that in a namespace of Python.
_Part = tuple[str, Any, tuple[Any, ...], Callable[[Any], None] | None]


class _Reader:
    def __init__(self, children: Callable[[Any], Mapping[str, Any] | None]) -> None:
        self.found: Values = {}
        self._children, self._seen = children, dict[int, Any]()

    def read(self, name: str, value: Any, key: tuple[Any, ...], put: Callable[[Any], None] | None) -> None:
        """Read a value, and all that it holds."""
        if (kind := _kind_of(value)) is not None:
            form = _comparable(value)
            self.found[key] = PythonValue(name, kind, form, put if form is value else None)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value  # no other object gets its id
            for part, inner, place, assign in self._parts(name, value):
                self.read(part, inner, (*key, *place) if len(place) == 1 else place, assign)

    def _parts(self, name: str, value: Any) -> Iterator[_Part]:
        """Yield the parts of a value."""

        def held(label: str, inner: Any, key: str, put: Any = None) -> _Part:
            return label, inner, (key,), put

        attributes = self._children(value)
        if attributes is not None or _is_plain_object(value):
            for key, inner in (vars(value) if attributes is None else attributes).items():
                own = vars(value)
                put = functools.partial(own.__setitem__, key) if key in own else None
                yield held(f"{name}.{key}" if name else key, inner, key, put)
            for kind in filter(_is_own, type(value).__mro__):
                yield held(kind.__name__, kind, kind.__qualname__)
        elif isinstance(value, type) and _is_own(value):
            for key, inner in list(vars(value).items()):
                if not key.startswith("__") or isinstance(inner, types.FunctionType):
                    yield held(f"{value.__name__}.{key}", inner, key, functools.partial(setattr, value, key))
        elif isinstance(value, dict | list | tuple | collections.deque):
            yield held(name, len(value), "len()")
            if len(value) <= _LONGEST:
                items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
                for key, inner in items:
                    put = None if isinstance(value, tuple) else functools.partial(value.__setitem__, key)
                    yield held(f"{name}[{key!r}]", inner, repr(key), put)
        elif isinstance(value, set | frozenset):
            yield held(name, repr(sorted(map(repr, value)) if len(value) <= _LONGEST else len(value)), "set()")
        elif isinstance(value, functools.partial):
            for key, inner in {"func": value.func, "args": value.args, "keywords": value.keywords}.items():
                yield held(name, inner, key)
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            yield held(name, value.__func__, "__func__")
            yield held(name, getattr(value, "__self__", None), "__self__")
        elif isinstance(value, property):
            yield held(name, value.fget, "fget")
        elif isinstance(value, types.FunctionType) and _is_own(value):
            yield from self._variables(value)

    @staticmethod
    def _variables(function: types.FunctionType) -> Iterator[_Part]:
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():
                put = functools.partial(setattr, cell, "cell_contents")
                yield key, cell.cell_contents, (key,), put
        given, code = function.__defaults__ or (), function.__code__
        arguments = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        for key, inner in {**dict(zip(arguments, given, strict=True)), **(function.__kwdefaults__ or {})}.items():
            yield key, inner, (key,), None
        names, variables = _names(function.__code__), function.__globals__
        modules = [each for key in names if isinstance(each := variables.get(key), types.ModuleType)]
        for held in (variables, *(vars(each) for each in modules if not _is_of_library(each.__name__))):
            for key in names & held.keys():
                if not isinstance(held[key], types.ModuleType):
                    yield key, held[key], (id(held), key), functools.partial(held.__setitem__, key)


def _names(code: types.CodeType) -> set[str]:
    """Return the names in a function, and in those that it defines."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _kind_of(value: Any) -> str | None:
    """Return the kind of a value without parts; None for one that has parts, or is none."""
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return "generator"
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return "number"
    if value is None or isinstance(value, bool | complex | str | bytes | np.generic | np.ndarray | itertools.count):
        return "value"
    # Those of the frameworks, without importing them.
    return "tensor" if hasattr(type(value), "shape") and hasattr(type(value), "dtype") else None


def _comparable(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes() if value.dtype != object else repr(value)
    if isinstance(value, itertools.count):
        return repr(value)
    return _Same(value) if _kind_of(value) == "tensor" else value


def _is_plain_object(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace) or (
        not isinstance(value, type | types.ModuleType | types.FunctionType)
        and _is_own(type(value))
        and hasattr(value, "__dict__")
    )


def _is_own(item: Any) -> bool:
    """Return whether a class or function is the user's own, of no library."""
    return not _is_of_library(item.__module__ or "")


@functools.cache
def _is_of_library(module: str) -> bool:
    if module in sys.builtin_module_names or module.partition(".")[0] == "graphscale":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in _LIBRARIES)
