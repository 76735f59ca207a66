"""Bytes that leave the processes, by the kernel's count: the least for a reduction of the gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.replicas.mpi import mpiexec, needs_mpi

pytestmark = [needs_mpi, pytest.mark.mpi]

# MPICH over sockets, without shared memory between processes of one machine.
SOCKETS = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1"}
COUNTED = Path("/proc/net/dev")


def library() -> str:
    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_replicas_send_what_the_theory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    if not COUNTED.exists() or "ofi" not in library():
        pytest.skip("counts bytes on Linux, with an MPICH that has the ofi device")
    for name, value in SOCKETS.items():
        monkeypatch.setenv(name, value)
    done = mpiexec(3, (sys.executable, str(ROOT / "benchmarks" / "replicas.py"), "wire"))
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["3", "no"], ["3", "yes"]]
    for _, sharded, messages, given, least, sent, _ in rows:
        gradients = 4 * 2**20
        assert int(given) == gradients * (2 if sharded == "yes" else 1)
        assert int(least) == round(2 * 2 / 3 * gradients)
        assert 0.98 * int(least) < int(sent) < 1.05 * int(least)
        assert int(messages) <= 8
