"""Every end of a rank: a line names the rank and the reason why the others stop, and none of them waits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.replicas.mpi import launcher, mpiexec, needs_mpi, program
from tests.replicas.programs.ending import WAYS
from tests.training.runs import make_digits

pytestmark = [needs_mpi, pytest.mark.mpi]

HOW = r"(| by signal {code} \(.*\)| with exit code {code})"  # the launcher may ask before the witness can
DIED = r"graphscale: rank {rank} \(process \d+ on .*\) has ended" + HOW + ", without"
LEFT = r"graphscale: rank \d: rank {rank} has ended {what}, .* cannot be done"
SAID = r"graphscale: rank {rank}: {what}"
# For each way its line: of a death, of a program that ends in order, of an exception.
CODES = {"os._exit(3)": 3, "os._exit(0)": 0, "SIGSEGV": 11, "SIGKILL": 9, "SIGTERM": 15, "SIGABRT": 6}
LEAVES = {"sys.exit(3)": "SystemExit(3)", "sys.exit(0)": "SystemExit(0)", "sys.exit(text)": "SystemExit('no more data"}
RAISES = {
    "exception": "LookupError: the data of this rank is gone",
    "no memory": "[^ ]*MemoryError: Unable to allocate 1.00 EiB",
    "KeyboardInterrupt": "KeyboardInterrupt",
}
SAVES = ("SIGTERM", "KeyboardInterrupt")  # with `graphscale train`, which stops after a checkpoint


def expected(how: str, way: str, rank: int) -> str:
    if how == "train" and way in SAVES:
        return r"graphscale: interrupted at step \d+ of 40, which is saved in kept/step-\d+"
    if way in CODES:
        return DIED.format(rank=rank, code=CODES[way])
    if way in LEAVES:
        return LEFT.format(rank=rank, what="its program" if how == "bare" else f"by {re.escape(LEAVES[way])}.*")
    return SAID.format(rank=rank, what=RAISES[way])


def test_all_ways_are_tried() -> None:
    assert set(WAYS) == {*CODES, *LEAVES, *RAISES}


@pytest.mark.cover(3)
@pytest.mark.sample(12)
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (3, 0)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["with", "bare", "train"])
def test_a_rank_that_ends(
    how: str, way: str, count: int, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_digits(tmp_path)
    monkeypatch.setenv("VICTIM", str(victim))
    done = mpiexec(count, program("ending", how, way), cwd=tmp_path)
    said = done.stdout + done.stderr
    line = expected(how, way, victim)
    assert "waited 20 s" not in said
    # MPICH counts only what a process itself says.
    is_open_mpi = len(launcher()) > 1
    assert done.returncode != 0 or (way == "os._exit(0)" and not is_open_mpi), said
    if is_open_mpi and re.search(rf"Process name: \[.*,{victim}\]|process rank {victim} with PID", said):
        return  # the launcher names it, and may be gone before the witness can speak
    # Another rank may have looked before the launcher ends it, and says so, too.
    died = f"rank {victim} (process "
    lines = [text for text in said.splitlines() if "graphscale: " in text and not (died in text and "has died" in text)]
    assert 1 <= len(lines) < count and all(re.search(line, text) for text in lines), said
