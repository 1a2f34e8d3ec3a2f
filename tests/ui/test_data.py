"""The data screen: upload, preview, plots and zoom."""

from __future__ import annotations

import re

import pytest

from tests.ui.conftest import WAIT_MS

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=WAIT_MS)
pytestmark = pytest.mark.ui
MARKUP = "<img src=x onerror=document.title='hacked'>"


def upload(page, app, name, content):
    page.goto(f"{app.root}/data")
    page.set_input_files(
        "#upload", files=[{"name": name, "mimeType": "text/csv", "buffer": content.encode()}]
    )


def drag(page, area, begin, end, *, down=0):
    """Drag over a part of a plot, and so many pixels down beside that."""
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] * begin, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, box["y"] + 40 + down, steps=6)
    page.mouse.up()


def test_a_bad_file_is_shown_with_its_problem_and_nothing_else_breaks(page, app, folder):
    page.goto(app.url)
    upload(page, app, "notes.pdf", "text")
    expect(page.locator("#problem")).to_contain_text('unsupported format ".pdf"')
    upload(page, app, "bad.csv", "a,b\n1,2\n3,4,5\n")
    expect(page.locator("#problem")).to_contain_text("bad.csv, line 3: has 3 cells")
    assert page.locator("#content").is_hidden()
    assert (folder / "data" / "bad.csv").exists()
    page.goto(f"{app.root}/data")
    page.click("text=load.csv")
    expect(page.locator("#rows tbody tr")).to_have_count(20)


def test_an_upload_is_previewed_plotted_and_zoomed(page, app):
    rows = [f"2024-01-01 00:{row // 60:02d}:{row % 60:02d},{row % 50},{row}" for row in range(3000)]
    page.goto(app.url)
    upload(page, app, "my load.csv", "\n".join([f"time,load,{MARKUP}", *rows]) + "\n")
    expect(page.locator("h1")).to_have_text("data/my-load.csv")
    expect(page.locator("#figures")).to_contain_text("3,000")
    expect(page.locator("#rows tbody tr")).to_have_count(20)
    expect(page.locator("#rows thead")).to_contain_text(MARKUP)
    page.click("[data-page=last]")
    expect(page.locator("#page")).to_contain_text("rows 2,981 to 3,000 of 3,000")
    plot = page.locator(".plot[data-column='1']")
    expect(plot).to_have_attribute("data-rows", "3000")
    expect(page.locator(".plot")).to_have_count(2)
    expect(page.locator("#range")).to_have_text("2024-01-01 00:00:00 to 2024-01-01 00:49:59")
    expect(page.locator("#columns svg")).to_have_count(2)
    expect(page.locator("#matrix tbody tr")).to_have_count(2)
    expect(page.locator("#remarks li")).to_have_count(1)  # they move what is below them
    area = plot.locator(".u-over")
    drag(page, area, 1 / 4, 1 / 2)
    expect(plot).to_have_attribute("data-rows", re.compile("^75.$"))
    page.click("[data-zoom=all]")
    expect(plot).to_have_attribute("data-rows", "3000")
    # the pointer may leave the plot, as where the page moves under it
    drag(page, area, 1 / 4, 1 / 2, down=400)
    expect(plot).to_have_attribute("data-rows", re.compile("^75.$"))
    page.click("[data-zoom=all]")
    expect(plot).to_have_attribute("data-rows", "3000")
    drag(page, area, 3 / 4, 5 / 4, down=-400)
    expect(plot).to_have_attribute("data-rows", re.compile("^75.$"))
    page.click("[data-zoom=all]")
    drag(page, area, 1 / 4, 1 / 2)
    expect(plot).to_have_attribute("data-rows", re.compile("^75.$"))
    page.click("[data-zoom=in]")
    expect(plot).to_have_attribute("data-rows", re.compile("^37.$"))
    page.locator("#plots").focus()
    page.keyboard.press("0")
    expect(plot).to_have_attribute("data-rows", "3000")
    page.click("[data-axis=row]")
    expect(page.locator("#range")).to_have_text("rows 1 to 3,000")
    page.click("#actions >> text=New run")
    expect(page.locator("#data")).to_have_value("data/my-load.csv")
    assert page.title() != "hacked"
