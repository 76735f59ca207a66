"""The cost of replicas: a simulation of a step on 1 to 1,024 of them, checked against measured ones on this machine.

    python benchmarks/replicas.py predict                         the tables of docs/how-to/replicas.md
    mpiexec -n 2 python benchmarks/replicas.py calibrate          fits alpha and beta to MPI_Allreduce; writes a file
    mpiexec -n N python benchmarks/replicas.py measure            steps on N replicas, beside the prediction mpiexec -n
    N python benchmarks/replicas.py wire               bytes that leave the processes, by the kernel's count

`wire` counts what goes through the loopback device, so let MPI use no shared memory; for MPICH:
MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp MPIR_CVAR_NOLOCAL=1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

import graphscale as gs
from graphscale.replicas.collectives import Replicas
from graphscale.replicas.reduction import mean_and_check

CALIBRATION = "replicas-calibration.json"
BATCH, WIDTH, LAYERS = 64, 512, 4
STEPS = 40


@dataclasses.dataclass(frozen=True)
class Network:
    """The alpha-beta model: a message of n bytes takes alpha + n * beta seconds.

    Attributes:
        alpha: seconds for a message to begin.
        beta: seconds for a byte.
    """

    alpha: float
    beta: float

    def allreduce(self, nbytes: float, size: int) -> float:
        """Reduce-scatter by recursive halving, allgather by recursive doubling (Thakur et al., 2005)."""
        return 2 * math.log2(size) * self.alpha + 2 * (size - 1) / size * nbytes * self.beta

    def small(self, size: int) -> float:
        """An allreduce of a few bytes: recursive doubling."""
        return math.log2(size) * self.alpha


@dataclasses.dataclass(frozen=True)
class Step:
    """The parts of a step, in seconds and bytes.

    Attributes:
        stages: seconds of each stage of the first half.
        buckets: bytes of each bucket, by stage.
        update: seconds of the second half.
        weights: bytes of the weights.
        check: seconds for a byte of a bucket to be averaged and checked.
    """

    stages: tuple[float, ...]
    buckets: tuple[tuple[int, ...], ...]
    update: float
    weights: int
    check: float = 0.0


def simulate(step: Step, network: Network, size: int, *, sharded: bool = False, overlaps: bool = True) -> float:
    """Seconds of a step: stages one after the other, messages one after the other, each when its bucket is there.

    Where there is no core left for the messages, they do not overlap with the stages.
    """
    computed = free = 0.0
    for seconds, buckets in zip(step.stages, step.buckets, strict=True):
        computed += seconds
        for nbytes in buckets if size > 1 else ():
            half = network.allreduce(nbytes, size) / (2 if sharded else 1)
            checked = step.check * nbytes / (size if sharded else 1)
            if overlaps:
                free = max(free, computed) + half + checked
            else:
                computed += half + checked
    end = max(computed, free)
    if size == 1:
        return end + step.update
    end += 2 * network.small(size)  # the flags, and the metrics
    end += step.update / (size if sharded else 1)
    return end + (network.allreduce(step.weights, size) / 2 if sharded else 0)


def deep_step() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A tanh network with momentum, and its first weights: 1 MiB of gradients a layer."""
    names = range(1, LAYERS + 1)
    forward = "\n".join(f"z{i} = MatMul({'x' if i == 1 else f'a{i - 1}'}, w{i})\na{i} = Tanh(z{i})" for i in names)
    backward = []
    for i in reversed(names):
        below = "x" if i == 1 else f"a{i - 1}"
        backward += [f"q{i} = Mul(a{i}, a{i})", f"s{i} = Sub(one, q{i})", f"dz{i} = Mul(da{i}, s{i})"]
        backward += [f"t{i} = Transpose<perm = [1, 0]>({below})", f"g{i} = MatMul(t{i}, dz{i})"]
        if i > 1:
            backward += [f"v{i} = Transpose<perm = [1, 0]>(w{i})", f"da{i - 1} = MatMul(dz{i}, v{i})"]
        backward += [f"h{i} = Mul(m{i}, momentum)", f"m{i}_next = Add(h{i}, g{i})"]
        backward += [f"u{i} = Mul(m{i}_next, rate)", f"w{i}_next = Sub(w{i}, u{i})"]
    square = f"float[{WIDTH}, {WIDTH}]"
    inputs = ", ".join(f"{square} w{i}, {square} m{i}" for i in names)
    outputs = ", ".join(f"{square} w{i}_next, {square} m{i}_next" for i in names)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 17]>
        step (float[N, {WIDTH}] x, float[N, {WIDTH}] y, {inputs}) => (float loss, {outputs})
        <float one = {{1}}, float momentum = {{0.9}}, float rate = {{0.01}}, float two = {{2}}> {{
            {forward}
            d = Sub(a{LAYERS}, y)
            e = Mul(d, d)
            loss = ReduceMean<keepdims = 0>(e)
            elements = Size(e)
            count = Cast<to = 1>(elements)
            factor = Div(two, count)
            da{LAYERS} = Mul(d, factor)
            {chr(10).join(backward)}
        }}""")
    rng = np.random.default_rng(0)
    weights = {
        f"w{i}": rng.standard_normal((WIDTH, WIDTH), np.float32) / np.sqrt(WIDTH, dtype=np.float32) for i in names
    }
    return model, {**weights, **{f"m{i}": np.zeros((WIDTH, WIDTH), np.float32) for i in names}}


def opened(comm: Any, **options: Any) -> tuple[gs.ReplicatedSession, dict[str, np.ndarray]]:
    """A session of this replica, with one thread, and its share of a batch."""
    model, state = deep_step()
    threads = ort.SessionOptions()
    threads.intra_op_num_threads, threads.log_severity_level = 1, 4
    session = gs.ReplicatedSession(
        gs.scale(model), comm, state=state, session_options=threads, bucket_bytes="1MiB", timeout=60, **options
    )
    rng = np.random.default_rng(comm.Get_rank())
    share = (BATCH // comm.Get_size(), WIDTH)
    return session, {"x": rng.random(share, np.float32), "y": rng.random(share, np.float32)}


def usual(run: Any, count: int = STEPS) -> float:
    """Seconds of a run, the lowest decile: what others do on the machine makes runs longer, never shorter."""
    seconds = []
    for _ in range(count + 3):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.quantiles(seconds[3:], n=10)[0]


def parts(comm_self: Any, size: int, stages: int) -> Step:
    """The parts of a step on a share of the batch, measured on this replica alone."""
    session, feeds = opened(comm_self, stages=stages)
    feeds = {name: array[: BATCH // size] for name, array in feeds.items()}
    values = session._first.check(feeds)
    seconds = tuple(usual(lambda stage=stage: session._first.run(stage, values, ())) for stage in range(stages))
    update = usual(lambda: session._update.apply({}, ()))
    gradients = list(session._update.arena.buckets)
    check = usual(lambda: [mean_and_check(bucket, 2) for bucket in gradients])
    total = sum(bucket.nbytes for bucket in gradients)
    per_stage = len(gradients) // stages
    sizes = [bucket.nbytes for bucket in gradients]
    buckets = tuple(tuple(sizes[i * per_stage : (i + 1) * per_stage]) for i in range(stages))
    session.close()
    return Step(seconds, buckets, update, total, check / total)


def calibrate(comm: Any) -> None:
    """Fit alpha and beta to allreduces of 8 bytes to 4 MiB."""
    replicas, rows = Replicas(comm, 60), []
    for power in range(3, 23):
        array = np.ones(max(1, 2**power // 4), np.float32)
        rows.append((array.nbytes, usual(lambda a=array: replicas.sum_in_place(a, "calibration")(), 30)))
    if replicas.rank:
        return
    size = replicas.size
    small = [(seconds, nbytes) for nbytes, seconds in rows if nbytes <= 1024]
    alpha = statistics.median(seconds for seconds, _ in small) / math.log2(size)
    large = [(s - 2 * math.log2(size) * alpha) / (2 * (size - 1) / size * n) for n, s in rows if n >= 2**19]
    found = Network(alpha, max(0.0, statistics.median(large)))
    Path(CALIBRATION).write_text(json.dumps(dataclasses.asdict(found)))
    print(f"alpha {found.alpha * 1e6:.1f} us, beta {found.beta * 1e9:.3f} ns/byte ({1 / found.beta / 1e9:.2f} GB/s)")


def measure(comm: Any, mpi: Any) -> None:
    """Steps on these replicas beside the simulation's prediction."""
    size, rank = comm.Get_size(), comm.Get_rank()
    network = Network(**json.loads(Path(CALIBRATION).read_text()))
    cores = len(os.sched_getaffinity(0))
    shared = max(1.0, size / cores)  # processes on one core take turns
    for stages, sharded in ((1, False), (2, False), (1, True)):
        # One replica after the other: none is to be slowed down by another one's measurement.
        step = None
        for turn in range(size):
            comm.Barrier()
            if turn == rank == 0:
                step = parts(mpi.COMM_SELF, size, stages)
        session, feeds = opened(comm, stages=stages, sharded=sharded)
        comm.Barrier()
        seconds = usual(lambda session=session, feeds=feeds: session.step(feeds, fetch=["loss"]), 100)
        session.close()
        if step is not None:
            predicted = shared * simulate(step, network, size, sharded=sharded, overlaps=2 * size <= cores)
            print(
                f"| {size} | {stages} | {'yes' if sharded else 'no'} | {seconds * 1e3:.2f} | {predicted * 1e3:.2f} | "
                f"{predicted / seconds - 1:+.0%} |"
            )


def sent() -> int:
    """Bytes that the loopback device has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def wire(comm: Any) -> None:
    """Bytes that leave a process in a step, beside the least that an allreduce can do with."""
    size = comm.Get_size()
    for sharded in (False, True):
        session, feeds = opened(comm, sharded=sharded)
        for _ in range(3):
            session.step(feeds)
        time.sleep(0.5)
        comm.Barrier()
        before, messages, nbytes = sent(), session.traffic.messages, session.traffic.bytes
        for _ in range(STEPS):
            session.step(feeds)
        time.sleep(0.5)
        comm.Barrier()
        after = sent()
        if comm.Get_rank() == 0:
            gradients = sum(bucket.nbytes for bucket in session._update.arena.buckets)
            least = 2 * (size - 1) / size * gradients
            moved = (after - before) / STEPS / size
            given = [(session.traffic.messages - messages) / STEPS, (session.traffic.bytes - nbytes) / STEPS]
            print(
                f"| {size} | {'yes' if sharded else 'no'} | {given[0]:.0f} | {given[1]:.0f} | {least:.0f} | "
                f"{moved:.0f} | {moved / least - 1:+.1%} |"
            )
        session.close()


NETWORKS = {"10 Gbit/s Ethernet": Network(30e-6, 8 / 10e9), "200 Gbit/s InfiniBand": Network(2e-6, 8 / 200e9)}


def predict() -> None:
    """A step of 100 million parameters: how much of the time N replicas compute."""
    total = 400_000_000
    stages = 8
    bucket = 25 * 2**20
    shares = tuple((bucket,) * (total // stages // bucket) for _ in range(stages))
    for name, network in NETWORKS.items():
        print(f"\n{name}\n")
        print("| replicas | bytes sent by each | step, 1 stage | step, 8 stages | sharded, 8 stages | efficiency |")
        print("|---:|---:|---:|---:|---:|---:|")
        together = Step((0.4,), (tuple(n for share in shares for n in share),), 0.02, total)
        overlapped = Step((0.05,) * stages, shares, 0.02, total)
        alone = simulate(together, network, 1)
        for power in range(11):
            size = 2**power
            moved = 2 * (size - 1) / size * total
            times = [simulate(together, network, size), simulate(overlapped, network, size)]
            times.append(simulate(overlapped, network, size, sharded=True))
            print(
                f"| {size:,} | {moved / 1e6:.0f} MB | {times[0] * 1e3:.0f} ms | {times[1] * 1e3:.0f} ms | "
                f"{times[2] * 1e3:.0f} ms | {alone / times[1]:.0%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "calibrate", "measure", "wire"])
    what = parser.parse_args().what
    if what == "predict":
        predict()
        return
    from mpi4py import MPI  # noqa: PLC0415  # predict needs none

    comm = MPI.COMM_WORLD
    {"calibrate": lambda: calibrate(comm), "measure": lambda: measure(comm, MPI), "wire": lambda: wire(comm)}[what]()


if __name__ == "__main__":
    main()
