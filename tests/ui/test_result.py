"""The result of a run in the browser: a series, zoom, a file that is dropped, an export."""

from __future__ import annotations

import re
import zipfile

import pytest

import slipstream
from tests.conftest import small_config, waves

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.ui
ENDED = re.compile("finished|failed|killed")
WAIT_MS = 180_000


@pytest.fixture
def result(folder):
    """A page's address: a finished run on two series."""
    import pandas as pd

    parts = [waves(300, seed=seed).to_pandas().assign(id=f"s{seed}") for seed in (0, 1)]
    pd.concat(parts).to_csv(folder / "table.csv", index=False)
    data = {"path": str(folder / "table.csv"), "id": "id", "inputs": ["b"], "targets": ["a"]}
    data |= {"horizon": 0, "context": 16}
    config = small_config(folder / "runs", data=data, model={"kind": "mlp"}, train={"epochs": 1})
    run = slipstream.train(config, quiet=True).run
    return f"/result/runs/{run.name}"


def drop(page, name, text):
    """Drop a file on the page, as a user does from a folder."""
    transfer = page.evaluate_handle(
        "([name, text]) => { const all = new DataTransfer();"
        " all.items.add(new File([text], name)); return all; }",
        [name, text],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def test_a_series_is_picked_and_zoomed_and_a_new_file_is_scored(page, app, folder, result):
    page.goto(app.url)
    page.goto(app.root + result)
    plot = page.locator("#plot")
    expect(plot.locator("canvas")).to_have_count(2)
    whole = int(plot.get_attribute("data-rows"))
    page.fill("#series-search", "S1")
    expect(page.locator("#series-list button")).to_have_count(1)
    page.click("#series-list button")
    expect(page.locator("#plot-title")).to_have_text("s1")
    box = plot.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 40, steps=4)
    page.mouse.up()
    expect(page.locator("#plot-note")).to_contain_text("time ")
    assert 0 < int(plot.get_attribute("data-rows")) < whole
    page.click("#whole")
    expect(plot).to_have_attribute("data-rows", str(whole))
    page.locator("#worst button").first.click()
    expect(page.locator("#plot-note")).to_contain_text("time ")
    drop(page, "new <b>.csv", (folder / "table.csv").read_text())
    test = page.locator(".test")
    expect(test).to_have_attribute("data-state", ENDED, timeout=WAIT_MS)
    expect(test).to_contain_text(re.compile(r"MAE [\d.]+ on \d+ windows; [\d.]+ on the test set"))
    test.locator("text=Show in the plot").click()
    expect(page.locator("#plot-note")).to_contain_text("Whole series: mean absolute error")
    expect(page.locator("#source")).not_to_have_value("")
    drop(page, "wrong.csv", "x,y\n1,2\n")
    expect(test.first).to_have_attribute("data-state", "failed", timeout=WAIT_MS)
    expect(test.first.locator(".message")).to_contain_text("wrong")


def test_a_model_is_exported_and_downloaded(page, app, result):
    pytest.importorskip("onnx", reason="ONNX is missing; install it: pip install onnx onnxruntime")
    page.goto(app.url)
    page.goto(app.root + result)
    card = page.locator("[data-format=onnx]")
    card.locator("button").click()
    expect(card).to_have_attribute("data-state", "finished", timeout=WAIT_MS)
    expect(card).to_contain_text("relative, of")
    with page.expect_download() as download:
        card.locator("text=Download").click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert {"onnx/export.json", "onnx/model.onnx"} <= set(archive.namelist())
