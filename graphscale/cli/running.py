"""The limits of commands that run models."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphscale.errors import GraphscaleError, VerifyError
from graphscale.files.limits import RUN_MEMORY, RUN_SECONDS, current_limits
from graphscale.process.child import is_out_of_memory, watching

__all__ = ["running"]

_COPIES = 16  # of weights, in the sessions of a verification


@contextlib.contextmanager
def running(
    models: Sequence[Path], providers: Sequence[str] | None = None, *, training: bool = False
) -> Iterator[None]:
    """Limit the CPU time, and on a CPU the memory, of runs of models in a `with` block.

    Args:
        models: the files of the models, or folders; the weights may lie beside them.
        providers: the execution providers; a GPU maps more memory than there is.
        training: True for runs that go on for as long as they are asked to: only limits that are given hold.
    """
    limits = current_limits()
    if training and limits.max_seconds is None and limits.max_memory is None:
        yield
        return
    memory = limits.max_memory or RUN_MEMORY + _COPIES * sum(map(_size_beside, models))
    try:
        with watching(limits.max_seconds or RUN_SECONDS, None if providers else memory):
            yield
    except MemoryError as error:
        raise VerifyError(f"the model takes more than {memory} bytes of memory to run (--max-memory)") from error
    except GraphscaleError as error:
        if not is_out_of_memory(error):
            raise
        raise VerifyError(f"the model takes more than {memory} bytes of memory to run (--max-memory)") from error


def _size_beside(model: Path) -> int:
    """Return the size of all files in the folder of a model."""
    folder = model if model.is_dir() else model.resolve().parent
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())
    return 0
