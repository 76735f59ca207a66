"""The page of examples/browser in Chromium: it trains as ONNX Runtime in Python does, and shows a skipped step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.chromium import BROWSER_MARKS, open_browser
from tests.examples.browser_site import LIBRARY, make_site, open_site, run

pytestmark = [
    *BROWSER_MARKS,
    pytest.mark.skipif(not LIBRARY.is_dir(), reason="needs npm install --ignore-scripts --prefix examples/browser"),
]
STEPS, OVERFLOW = 100, 57


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    make_site(folder)
    return folder


@pytest.fixture(scope="module")
def driver(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser, open_site(site, browser):
        yield browser


def train_in_python(site: Path) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train on the same files with plain ONNX Runtime; return the carried state and the losses."""
    description = json.loads((site / "step.json").read_text("utf-8"))
    data = (site / "tensors.bin").read_bytes()
    tensors = {
        row["name"]: np.frombuffer(data, row["type"], int(np.prod(row["dims"])), row["offset"]).reshape(row["dims"])
        for row in description["tensors"]
    }
    session = ort.InferenceSession(site / "step.onnx", providers=["CPUExecutionProvider"])
    carried = {name: tensors[f"state/{name}"] for name in description["pairs"]}
    names, losses = [output.name for output in session.get_outputs()], []
    for number in range(STEPS):
        rows = (number * description["batch"] + np.arange(description["batch"])) % len(tensors["train/labels"])
        images = tensors["train/images"][rows].astype(np.float32) / 16
        if number + 1 == OVERFLOW:
            images[0, 27] = np.inf
        batch = {
            "images": images,
            "labels": tensors["train/labels"][rows].astype(np.int64),
            "learning_rate": np.array(description["learningRate"], np.float32),
        }
        results = dict(zip(names, session.run(names, batch | carried), strict=True))
        assert bool(results["all_finite"]) == (number + 1 != OVERFLOW)
        carried = {name: results[output] for name, output in description["pairs"].items()}
        losses.append(float(results["loss"]))
    return carried, losses


def test_weights_after_training_are_those_of_python(site: Path, driver: Any) -> None:
    seen = run(
        driver,
        f"""
        await page.reset();
        for (let step = 1; step <= {STEPS}; step++) {{
          page.infinite = step === {OVERFLOW};
          await page.step();
        }}
        const carried = {{}};
        for (const [name, tensor] of Object.entries(page.training.carried)) {{
          carried[name] = Array.from(tensor.data, Number);
        }}
        return {{ carried, losses: page.losses.values, scales: page.scales.values, skipped: page.losses.skipped }};
        """,
    )
    carried, losses = train_in_python(site)
    assert seen["skipped"] == [OVERFLOW]
    assert (seen["scales"][OVERFLOW - 2], seen["scales"][OVERFLOW - 1]) == (2048, 1024)
    assert seen["losses"][-1] < 0.7 * seen["losses"][0]
    for name, value in carried.items():
        np.testing.assert_allclose(np.reshape(seen["carried"][name], value.shape), value, rtol=1e-5, atol=1e-5)
    finite = [number for number in range(STEPS) if number + 1 != OVERFLOW]
    np.testing.assert_allclose(np.array(seen["losses"], float)[finite], np.array(losses)[finite], rtol=1e-5)


def test_buttons_train_and_skip_and_start_over(driver: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    def text(name: str) -> str:
        return str(driver.find_element("id", name).text)

    def wait(condition: Any) -> None:
        WebDriverWait(driver, 60, poll_frequency=0.05).until(lambda _: condition())

    run(driver, "await page.reset()")
    assert text("step") == "0"
    driver.find_element("id", "run").click()
    wait(lambda: int(text("step")) >= 10)
    driver.find_element("id", "overflow").click()
    wait(lambda: text("skipped") == "1")
    assert "the loss scale fell from 1,024 to 512" in text("news")
    driver.find_element("id", "run").click()
    assert text("run") == "Train"
    run(driver, "await page.work")
    count = int(text("step"))
    assert len(driver.find_elements("css selector", "svg .skip")) == 2
    driver.find_element("id", "overflow").click()
    wait(lambda: int(text("step")) == count + 1)
    assert (text("skipped"), text("scale"), text("loss")) == ("2", "256", "not finite")
    assert text("accuracy").endswith("%") and len(driver.find_elements("css selector", "#digits li")) == 16
    driver.find_element("id", "reset").click()
    wait(lambda: text("step") == "0")
    assert (text("skipped"), text("scale")) == ("0", "1,024")
    assert driver.get_log("browser") == []


def test_large_scales_fit_into_the_page(driver: Any) -> None:
    seen = run(
        driver,
        """
        await page.reset();
        for (const power of [10, 20, 127]) page.scales.add(2 ** power, true);
        page.scales.draw();
        const { count } = await import("./chart.js");
        document.getElementById("scale").textContent = count(2 ** 127);
        const labels = [...document.querySelectorAll("#scale-chart text")];
        const figures = [...document.querySelectorAll(".figures div")];
        return {
          left: Math.min(...labels.map((label) => label.getBBox().x)),
          labels: labels.map((label) => label.textContent),
          cut: figures.filter((figure) => figure.scrollWidth > figure.clientWidth).length,
          counts: [0.001, 0, 512, 65536, 2 ** 17, 100000].map(count),
        };
        """,
    )
    assert seen["left"] >= 0 and seen["cut"] == 0
    assert "2¹²⁹" in seen["labels"]
    assert seen["counts"] == ["0.001", "0", "512", "65,536", "2¹⁷", "100,000"]
    run(driver, "await page.reset()")


def test_a_missing_file_is_reported_on_the_page(site: Path, driver: Any) -> None:
    (site / "step.json").rename(site / "away.json")
    try:
        driver.refresh()
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(driver, 60).until(lambda opened: "404" in opened.find_element("id", "news").text)
        assert "step.json" in driver.find_element("id", "news").text
        assert not driver.find_element("id", "run").is_enabled()
    finally:
        (site / "away.json").rename(site / "step.json")
