"""Random edits of scaled graphs: does `verify` accept one that changes anything?

    python benchmarks/random_edits.py [--count N] [--seed N] --log FILE.jsonl [--output FILE.md] [--again FILE.jsonl]

Each edit follows from the seed and its index: a scaled graph of `edits/subjects.py`, a kind of edit and a place, drawn
by `edits/generator.py`, which knows nothing of `verify`. An edit that `verify` accepts must change nothing that
`edits/behaviour.py` can see; one that does is a survivor. The log has a line for each edit; an interrupted run
continues from it, and the table is written from it.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import graphscale as gs  # noqa: E402
from benchmarks.edits.behaviour import Behaviour, UnlikeError, UnloadableError  # noqa: E402
from benchmarks.edits.generator import Edited, edit  # noqa: E402
from benchmarks.edits.subjects import Subject, subjects  # noqa: E402
from benchmarks.edits.table import write_table  # noqa: E402

__all__ = ["Attack"]

_SLOW = 20  # seconds of the processor


class _SlowError(Exception):
    """Verify took too long."""


class Attack:
    """Edits by their index.

    Args:
        seed: of all edits, and of the feeds.
        chosen: the graphs; smaller ones are drawn more often.
    """

    def __init__(self, seed: int, chosen: list[Subject]) -> None:
        self.seed, self.subjects = seed, chosen
        weights = np.array([subject.weight for subject in chosen])
        self._shares = weights / weights.sum()
        self._behaviours: dict[str, Behaviour] = {}

    def edited(self, index: int) -> tuple[Subject, Edited]:
        """The edit of an index, and what it is an edit of."""
        rng = np.random.default_rng([self.seed, index])
        while True:
            subject = self.subjects[int(rng.choice(len(self.subjects), p=self._shares))]
            if subject.is_possible:
                break
        others = [other.scaled for other in self.subjects if other.name == subject.name and other.is_possible]
        return subject, edit(subject.scaled, rng, others)

    def judge(self, index: int) -> dict[str, Any]:
        """The verdict on an edit, and, where it is accepted, any change."""
        subject, edited = self.edited(index)
        record = {"index": index, "graph": str(subject), "kind": edited.kind, "places": list(edited.places)}
        record["kinds"] = list(edited.kinds)
        started = time.process_time()
        try:
            accepted = _in_time(functools.partial(subject.verified, edited.model))
        except gs.GraphscaleError:
            accepted = False
        except Exception as error:
            return {**record, "verdict": "crash", "why": f"{type(error).__name__}: {str(error)[:300]}"}
        record["seconds"] = round(time.process_time() - started, 3)
        return {**record, **self.compared(subject, edited)} if accepted else {**record, "verdict": "rejected"}

    def compared(self, subject: Subject, edited: Edited) -> dict[str, Any]:
        """An accepted edit changes something."""
        key = str(subject)
        if key not in self._behaviours:
            self._behaviours[key] = Behaviour(subject, self.seed)
        behaviour = self._behaviours[key]
        ran = {"ran": behaviour.ran, "runtime": ort.__version__}
        try:
            behaviour.compare(edited.model)
        except UnloadableError as error:
            return {"verdict": "unloadable", "why": str(error), **ran}
        except UnlikeError as error:
            return {"verdict": "survivor", "why": str(error), **ran}
        return {"verdict": "equal", **ran}


def _in_time(run: Any) -> bool:
    def stop(*_: Any) -> None:
        raise _SlowError(f"more than {_SLOW} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _SLOW)
    try:
        return bool(run())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """The records of a log by index; an edit at which the process ended is a crash."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        found[record["index"]] = record
    return found


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.CRITICAL)
    attack, done = Attack(arguments.seed, subjects()), read_log(arguments.log)
    wanted: Any = range(arguments.first, arguments.first + arguments.count)
    if arguments.again is not None:
        wanted = [i for i, record in read_log(arguments.again).items() if record["verdict"] != "rejected"]
    with arguments.log.open("a", encoding="utf-8") as log:
        for index in wanted:
            if index in done:
                continue
            begun = {"index": index, "kind": "?", "graph": "?", "places": [], "kinds": []}
            print(json.dumps({**begun, "verdict": "crash", "why": "the process ended"}), file=log, flush=True)
            done[index] = attack.judge(index)
            print(json.dumps(done[index]), file=log, flush=True)
            if done[index]["verdict"] not in ("rejected", "equal"):
                print(json.dumps(done[index]), flush=True)
    strange = write_table(arguments.output, arguments.seed, list(done.values())) if arguments.output is not None else []
    sys.exit(bool(strange) or any(record["verdict"] not in ("rejected", "equal") for record in done.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first index")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True, help="a line of JSON for each edit")
    parser.add_argument(
        "--again", type=Path, help="make the edits again that this log does not call rejected, and no others"
    )
    parser.add_argument("--output", type=Path, help="where to write the table as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
