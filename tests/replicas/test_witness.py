"""The witness of replicas: the first end that is no consequence of another."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time

import pytest

from graphscale.replicas import witness

pytestmark = [
    pytest.mark.static,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the witness needs pidfd_open of Linux"),
]


@pytest.mark.parametrize("others_end", [True, False])
def test_a_killed_process_is_named_if_no_other_end_follows(
    others_end: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(witness, "_MOMENT", 1.0)
    waiting = [subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) for _ in range(2)]
    killed, failing = waiting

    def end() -> None:
        killed.kill()
        time.sleep(0.3)
        if others_end:
            failing.communicate()

    box, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    timer = threading.Timer(0.3, end)
    timer.start()
    with box, peer:
        witness._watch(box, {0: killed.pid, 1: failing.pid})
    timer.join()
    reported = capfd.readouterr().err
    named = f"rank 1 (process {failing.pid}" if others_end else f"rank 0 (process {killed.pid}"
    assert named in reported
    assert ("SIGKILL" in reported) != others_end
    for process in waiting:
        process.communicate()
