"""The witness of replicas: the first end that is no consequence of another."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading

import pytest

from graphscale.replicas import witness

pytestmark = [
    pytest.mark.static,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the witness needs pidfd_open of Linux"),
]


@pytest.mark.full
@pytest.mark.parametrize("others_end", [True, False])
def test_a_killed_process_is_named_if_no_other_end_follows(others_end: bool, capfd: pytest.CaptureFixture[str]) -> None:
    waiting = [subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) for _ in range(2)]
    killed, failing = waiting
    box, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def end() -> None:
        killed.kill()
        select.select([os.pidfd_open(killed.pid)], [], [])
        if others_end:
            failing.communicate()

    thread = threading.Thread(target=end)
    with box, peer:
        thread.start()
        witness._watch(box, {0: killed.pid, 1: failing.pid}, moment=1.0)
    thread.join()
    reported = capfd.readouterr().err
    named = f"rank 1 (process {failing.pid}" if others_end else f"rank 0 (process {killed.pid}"
    assert named in reported
    assert ("SIGKILL" in reported) != others_end
    for process in waiting:
        process.communicate()
