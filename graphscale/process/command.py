"""A command from its first line to its exit code."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from graphscale.errors import GraphscaleError, one_line
from graphscale.process.interruption import Interruption
from graphscale.process.streams import Output, replace_streams, tell

__all__ = ["run"]


def run(command: Callable[[], int]) -> NoReturn:
    """Run a command, and exit with the code that it returns.

    A GraphscaleError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. Where nobody reads stdout any
    more, the process ends as others do, by SIGPIPE. Streams and signals that are not the process's own, as in tests,
    stay as they are.
    """
    output, interruption = None, Interruption()
    if sys.stdout is sys.__stdout__:
        output = replace_streams()
        interruption.watch()
        warnings.showwarning = lambda message, *_: tell(f"warning: {one_line(message)}")
    try:
        code = _find_code(command, output, interruption)
    except KeyboardInterrupt:
        code = 130
    if output is not None:
        interruption.end()
        output.end()
    sys.exit(code)


def _find_code(command: Callable[[], int], output: Output | None, interruption: Interruption) -> int:
    try:
        code = command()
        if output is not None:
            sys.stdout.flush()
            output.check()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:
        if interruption.received:  # an import may have turned it into an error of its own
            return 130
        if isinstance(error, GraphscaleError):
            tell(one_line(error))
            return 2
        if output is None:
            raise
        tell(traceback.format_exc().rstrip())
        return 1
    return code
