"""The decorator by which errors on a damaged model name its damage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from graphscale.errors import GraphscaleError, ModelFileError

__all__ = ["name_damage"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def name_damage(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function of models, or of paths to models or folders, so that its errors name the damage.

    Raises:
        ModelFileError: an argument is damaged, and the function has raised another error than graphscale's.
    """

    @functools.wraps(function)
    def explaining(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except GraphscaleError:
            raise
        except Exception as error:
            from graphscale.graph.diagnosis import find_damage  # a sound model needs none of it

            if (damage := find_damage((*args, *kwargs.values()))) is not None:
                raise ModelFileError(damage) from error
            raise

    return explaining
