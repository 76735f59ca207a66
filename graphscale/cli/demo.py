"""graphscale demo: train a digit classifier from a scaled training step, with one overflow on the way; or compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.console import Console

from graphscale.cli.options import Provider, option, output_path
from graphscale.cli.progress import Tally, show_table
from graphscale.cli.show import EscapedTable, make_console, make_table, make_text, print_json, say
from graphscale.process.stages import report_stage
from graphscale.targets import CPU_PROVIDER, CUDA_PROVIDER
from graphscale.training import run_plot
from graphscale.training.record import StepRecord

if TYPE_CHECKING:
    from graphscale.demo.precision import Run

__all__ = ["demo"]


def demo(
    precision: Annotated[
        bool, option("Compare float32 with float16 without, with a fixed, and with a dynamic loss scale.")
    ] = False,
    output: Annotated[
        Path | None,
        output_path("The picture. Default: demo.png; with --precision precision.png."),
    ] = None,
    steps: Annotated[
        int | None, option("Training steps. Default: 2000; with --precision 300 in each run.", min=100, max=1_000_000)
    ] = None,
    seed: Annotated[int, option("The seed of split, weights and batches.", min=0)] = 0,
    provider: Provider = None,
) -> None:
    """Train a digit classifier from a scaled training step, with one overflow on the way, and draw the run.

    Examples:
        graphscale demo
        graphscale demo --precision --steps 100 -o precision.svg
        graphscale demo --precision --provider CUDAExecutionProvider
    """
    from graphscale.demo.training import require

    require()
    from graphscale.session.loading import choose_device

    providers = provider or [CPU_PROVIDER]
    choose_device(providers)
    picture = output or Path("precision.png" if precision else "demo.png")
    run_plot.check_picture(picture)
    console = make_console()
    if precision:
        _compare(picture, steps or 300, seed, console, providers)
    else:
        _overflow(picture, steps or 2000, seed, console, providers)


def _overflow(output: Path, steps: int, seed: int, console: Console, providers: Sequence[str]) -> None:
    from graphscale.demo.training import Training

    training = Training(steps, seed, providers)
    report = training.scaled.report
    say(
        ("digits_step.onnx", "bold"),
        f", a training step exported from PyTorch: {report.nodes_before} nodes, ",
        f"{report.nodes_after} with loss scaling inside.",
    )
    tally = Tally()
    records = list(tally.follow(training.run(), steps))
    report_stage("training once more without loss scaling, to compare every bit")
    differing = training.differing()
    skipped = [record for record in records if not record.applied]
    run_plot.draw(
        records,
        output,
        title="One training step as one ONNX graph, its loss scale inside",
        curves=[run_plot.Curve("held-out accuracy (%)", _accuracy, limits=(0, 104), last="{:.1f} %")],
        notes={
            r.step: f"an Inf in the batch of step {r.step}:\nthe step is skipped, every weight kept" for r in skipped
        },
    )
    print_json(
        lambda: {
            **tally.to_dict(),
            "skipped_steps": [record.step for record in skipped],
            "accuracy": _accuracy(records[-1]),
            "different_weights": list(differing),
            "output": str(output),
        }
    )
    same = ("the same batches but the skipped one give ", ("bit-identical", "green"), " weights")
    rows = [
        *tally.rows(),
        *((f"  step {r.step}", _describe_skip(r)) for r in skipped),
        ("held-out accuracy", f"{_accuracy(records[-1]):.1f} %"),
        ("without loss scaling", ((f"different: {', '.join(differing)}", "red"),) if differing else same),
    ]
    show_table(console, rows)
    say("The picture of this run: ", (str(output), "bold"))
    say(("What float16 loses without a loss scale: graphscale demo --precision", "dim"))


def _accuracy(record: StepRecord) -> float | None:
    value = record.outputs.get("accuracy")
    return None if value is None else 100 * value


def _describe_skip(record: StepRecord) -> str:
    return f"an Inf in the batch; all weights kept, scale {record.loss_scale:.0f} -> {record.next_loss_scale:.0f}"


# --- the comparison of precisions -----------------------------------------------------------------------------------


def _compare(output: Path, steps: int, seed: int, console: Console, providers: Sequence[str]) -> None:
    from graphscale.demo import precision
    from graphscale.demo.precision_plot import draw

    runs = []
    for task in precision.tasks(seed):
        for way in precision.ways(steps):
            for number, run in enumerate(precision.train(task, way, steps, providers), start=1):
                last = run.records[-1]
                zeros = f"loss {task.loss(last):.4f}, zeros {100 * (last.zero_fraction or 0):.0f} %"
                report_stage(f"{task.name}, {way.name}: {zeros}", number, steps)
            runs.append(run)
    is_emulated = CUDA_PROVIDER not in providers
    draw(runs, output, is_emulated)
    print_json(lambda: {"runs": [_describe_run(run) for run in runs], "output": str(output)})
    console.print(_make_table(runs))
    console.print("right: answers on held-out data; zeros: elements of the gradients, the median over the steps")
    if is_emulated:
        console.print("float16 is emulated: each value is rounded to it.")
    say("The picture: ", (str(output), "bold"))


def _describe_run(run: Run) -> dict[str, Any]:
    return {
        "task": run.task.name,
        "way": run.way.name,
        "loss": float(np.mean(run.losses[-10:])),
        "accuracy": run.accuracy,
        "zeros": float(np.median(run.zeros)),
        "loss_scale": run.records[-1].next_loss_scale,
        "skipped": sum(not record.applied for record in run.records),
    }


def _make_table(runs: Sequence[Run]) -> EscapedTable:
    headers = ("loss", "right", "zeros", "scale", "skipped")
    table = make_table(*headers, left="", title="What happened", title_justify="left")
    for name in dict.fromkeys(run.task.name for run in runs):
        table.add_row(make_text((name, "bold")))
        for run in (run for run in runs if run.task.name == name):
            loss, zeros = float(np.mean(run.losses[-10:])), float(np.median(run.zeros))
            cells = [f"{loss:.3g}", f"{100 * run.accuracy:.1f} %", f"{100 * zeros:.0f} %"]
            if run.way.float16:
                cells.append(f"2^{np.log2(run.records[-1].next_loss_scale):.0f}")
                cells.append(str(sum(not record.applied for record in run.records)))
            table.add_row(f"  {run.way.name}", *cells)
    return table
