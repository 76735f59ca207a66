"""The process of the command line: Ctrl-C at any time, and full, closed or differently encoded standard streams.

`graphscale` imports this first, so that Ctrl-C during all other imports ends the process without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

# The program's name while Python searches `python -m graphscale`, and that of the console script.
if os.path.basename((sys.argv or [""])[0]) in ("-m", "graphscale"):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from graphscale.process.streams import open_descriptors

    open_descriptors()
