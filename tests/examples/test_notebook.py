"""The notebook of examples/: its cells run in order, and its results show themselves as tables."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest

from graphscale.process.summary import Summary

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_steps.ipynb"
SHOWN = ["Report", "ScaledModel", "VerifyReport", "Session", "StepResult"]


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text("utf-8"))
    return found


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in read()["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a kernel does: the value of its last expression is the result."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last is not None else None


def test_it_is_stored_without_results() -> None:
    notebook = read()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    assert NOTEBOOK.stat().st_size < 10_000


@pytest.mark.full
def test_its_cells_run() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
    backend = matplotlib.get_backend()
    matplotlib.use("agg")
    names: dict[str, Any] = {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            results = [run_cell(source, names) for source in code_cells()]
    finally:
        matplotlib.pyplot.close("all")
        matplotlib.use(backend)
    assert [type(result).__name__ for result in results if isinstance(result, Summary)] == SHOWN
    assert names["report"].ok
    assert printed.getvalue().startswith("step 180 was skipped; the loss scale is now ")
    assert names["losses"][-1] < 0.2 * names["losses"][0]
    assert names["again"].loss_scale == names["session"].loss_scale


@pytest.mark.full
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel", "matplotlib", "sklearn"))),
    reason="needs nbclient, ipykernel, scikit-learn and matplotlib",
)
def test_a_kernel_shows_tables_and_a_picture() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    tables = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) == len(SHOWN)
    for table, name in zip(tables, SHOWN, strict=True):
        assert f">{name}: " in table
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert not any(output.output_type == "error" for output in outputs)
