"""Reports in a real browser; skipped where no Chromium is installed."""

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from streamrl.inspection.report.page import page_of, write_page
from streamrl.inspection.report.record import RunRecord, read_record
from streamrl.schemas.starts import ChangedValue, RunStart
from tests.inspection.dashboard.browser import Page, browser_page, chromium, expect_no_serious_issue
from tests.inspection.report.recorded import gather, record_run

EXECUTABLE = chromium()
NEEDS_CHROMIUM = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed, and none is downloaded")
Test = TypeVar("Test", bound=Callable[..., object])
EVIL = '</script><script>window.owned = true</script><img src="https://example.com/x" onerror="window.owned = true">'
FIRST_CURVE = "document.querySelector('#curves canvas').toDataURL()"
HUES = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), found = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join());
  return [...found];
}"""
LEGEND = "document.querySelector('#curves .u-legend').innerText"
pytestmark = [pytest.mark.asyncio(loop_scope="module")]


def in_browser(test: Test) -> Test:
    """Mark a test that opens a page in Chromium, which is a process of its own."""
    marked: Test = NEEDS_CHROMIUM(pytest.mark.processes(test))
    return marked


@dataclass(frozen=True)
class Written:
    """``single`` is the first run's page, ``compared`` that of all three; the last kept nothing of its topics."""

    records: tuple[RunRecord, ...]
    single: Path
    compared: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder, records = tmp_path_factory.mktemp("reports"), []
    for seed in (1, 2, 3):
        recorded = record_run(folder / f"trial-{seed}", seed=seed, completion=EVIL)
        if seed < 3:
            await gather(recorded)
        records.append(read_record(recorded.directory, recorded.name))
    single, compared = folder / "single.html", folder / "compared.html"
    write_page(single, records[:1])
    write_page(compared, records)
    return Written(tuple(records), single, compared)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Page]:
    assert EXECUTABLE is not None
    async with browser_page(EXECUTABLE) as page:
        await page.size(1280, 1000)
        yield page


@pytest_asyncio.fixture(loop_scope="module", params=["single", "compared"])
async def page(request: pytest.FixtureRequest, written: Written, browser: Page) -> Page:
    browser.problems.clear()
    await browser.open(getattr(written, request.param).as_uri())
    return browser


async def test_a_report_is_small_and_names_no_other_place(written: Written) -> None:
    for path in (written.single, written.compared):
        text = path.read_text()
        assert 40_000 < len(text) < 300_000
        assert 'src="' not in text
        assert '<link rel="icon" href="data:,">' in text


async def test_texts_of_a_run_are_escaped(written: Written) -> None:
    assert EVIL not in page_of(written.records[:1])
    assert "&lt;/script&gt;" in page_of(written.records[:1])
    assert "<b>wrong</b>" not in page_of(written.records[:1])


async def test_a_run_that_kept_nothing_of_its_topics_says_how_to_have_it(written: Written) -> None:
    assert "trial-3: topics were not read" in page_of(written.records)
    assert "streamrl report --run RUN --from-topics" in page_of(written.records[2:])
    assert "topics were not read" not in page_of(written.records[:1])


@in_browser
async def test_everything_is_drawn_and_nothing_complains(page: Page) -> None:
    drawn = await page.evaluate(
        "[...document.querySelectorAll('canvas')].map((each) => [each.getAttribute('aria-label'),"
        " each.getContext('2d').getImageData(0, 0, each.width, each.height).data.some(Boolean),"
        " each.getBoundingClientRect().height > 30])"
    )
    assert len(drawn) > 12
    assert all(told and painted and visible for told, painted, visible in drawn), drawn
    assert not any("NaN" in told or "undefined" in told for told, _, _ in drawn), drawn
    shares = await page.evaluate("[...document.querySelectorAll('.shares')].map((each) => each.textContent)")
    assert any(re.fullmatch(r"trainer\d+%.*", told) for told in shares)
    assert not await page.evaluate("window.owned === true")
    assert await page.evaluate("performance.getEntriesByType('resource').length") == 0
    assert page.problems == []


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_serious_issue(page: Page, scheme: str) -> None:
    await page.prefer(scheme)
    await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    await page.call("Page.setBypassCSP", enabled=True)
    await expect_no_serious_issue(page)
    await page.prefer("light")


@in_browser
async def test_curves_go_over_wall_clock_if_wanted(page: Page) -> None:
    before = await page.evaluate(FIRST_CURVE)
    await page.evaluate("document.querySelector('[data-axis=time]').click()")
    await page.until(f"{FIRST_CURVE} !== {json.dumps(before)}")
    await page.point_at("#curves .u-over")
    assert (await page.evaluate(LEGEND)).startswith("after ")
    assert await page.evaluate("document.querySelector('[data-axis=time]').getAttribute('aria-pressed')") == "true"


@in_browser
async def test_curves_are_smoothed_if_wanted_and_tell_what_was_measured(browser: Page, tmp_path: Path) -> None:
    recorded = record_run(tmp_path / "long", seconds=240.0)
    write_page(tmp_path / "long.html", [read_record(recorded.directory, recorded.name)])
    await browser.open((tmp_path / "long.html").as_uri())
    told = []
    for _ in range(2):
        await browser.point_at("#curves .u-over")
        told.append([await browser.evaluate(FIRST_CURVE), await browser.evaluate(LEGEND)])
        await browser.evaluate("document.getElementById('smooth').click()")
    assert told[0][0] != told[1][0]
    assert told[0][1] == told[1][1]


@in_browser
async def test_pointing_at_a_curve_shows_its_values(page: Page) -> None:
    await page.point_at("#curves .u-over")
    assert re.match(r"step \d+\s\D+\d", await page.evaluate(LEGEND))
    await page.point_at("h1")
    assert "step" not in await page.evaluate(LEGEND)


@in_browser
async def test_the_timeline_is_zoomed_by_keys_buttons_and_dragging_and_told_by_pointing(page: Page) -> None:
    lanes = "document.querySelector('#timeline canvas').toDataURL()"
    whole = await page.evaluate(lanes)
    await page.evaluate("document.querySelector('#timeline [tabindex]').focus()")
    await page.press("+")
    assert await page.evaluate(lanes) != whole
    await page.press("Home")
    assert await page.evaluate(lanes) == whole
    await page.evaluate("document.querySelector('#timeline [aria-label=earlier]').click()")
    assert await page.evaluate(lanes) == whole
    await page.evaluate("document.querySelector('#timeline [aria-label=\"zoom in\"]').click()")
    assert await page.evaluate(lanes) != whole
    await page.press("Home")
    await page.drag("#timeline .u-over", 0.25, 0.5)
    assert await page.evaluate(lanes) != whole
    label = await page.evaluate("document.querySelector('#timeline canvas').getAttribute('aria-label')")
    assert "trainer, worker-0, worker-1, worker-2" in label
    await page.point_at("#timeline .u-over", y=0.4)
    told = await page.evaluate("document.querySelector('#timeline .legend').textContent")
    assert re.match(r"(trainer|worker-\d) · after ", told)
    await page.point_at("h1")


@in_browser
async def test_charts_take_the_colours_of_the_scheme_and_those_of_paper_are_light(page: Page) -> None:
    light = await page.evaluate(FIRST_CURVE)
    await page.prefer("dark")
    await page.until(f"{FIRST_CURVE} !== {json.dumps(light)}")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    await page.call("Emulation.setEmulatedMedia", media="print", features=features)
    await page.until(f"({HUES})(document.querySelector('#curves canvas')).includes('11,117,101')")
    await page.call("Emulation.setEmulatedMedia", media="", features=[])
    await page.until(f"{FIRST_CURVE} === {json.dumps(light)}")


@in_browser
async def test_paper_is_light_and_shows_what_was_folded(page: Page) -> None:
    await page.prefer("dark")
    dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    await page.call("Emulation.setEmulatedMedia", media="print", features=features)
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != dark
    assert await page.evaluate("getComputedStyle(document.querySelector('.bar')).display") == "none"
    await page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert await page.evaluate("[...document.querySelectorAll('details')].every((each) => each.open)")
    await page.call("Emulation.setEmulatedMedia", media="", features=[])


async def test_a_report_starts_with_its_result_and_six_tiles(written: Written) -> None:
    single, compared = page_of(written.records[:1]), page_of(written.records)
    assert "<h2>held out: exact match</h2>" in single
    assert '0.250 <span aria-label="to">→</span> <b>0.750</b> <span class="change">+0.500</span>' in single
    assert single.count('class="tile"') == 6
    assert single.index("held out: exact match") < single.index('class="tiles"') < single.index("<h2>Setup</h2>")
    assert single.index("<h2>Setup</h2>") < single.index("<h2>Curves</h2>") < single.index("<h2>All figures</h2>")
    assert "loop.max_staleness</span> <code>1</code> <small>default 4</small>" in single
    assert 'class="tile"' not in compared


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nothing_is_cut_on_a_phone(browser: Page, written: Written, scheme: str) -> None:
    await browser.size(400, 900)
    try:
        await browser.prefer(scheme)
        await browser.open(written.single.as_uri())
        assert await browser.evaluate("document.documentElement.scrollWidth") == 400
        beyond = (
            "[...document.querySelectorAll('.tile, .headline p, .stacks td, .setup td, .figures td, figure')]"
            ".filter((each) => each.getBoundingClientRect().right > 400 || each.scrollWidth > each.clientWidth + 1)"
            ".map((each) => each.outerHTML.slice(0, 80))"
        )
        assert await browser.evaluate(beyond) == []
    finally:
        await browser.size(1280, 1000)
        await browser.prefer("light")


@in_browser
async def test_samples_are_not_cut_at_the_right(browser: Page, written: Written) -> None:
    await browser.open(written.single.as_uri())
    assert await browser.evaluate(
        "[...document.querySelectorAll('.stacks')].every((each) => each.scrollWidth <= each.parentElement.clientWidth)"
    )


@in_browser
async def test_marks_are_drawn_into_the_curves_and_named(browser: Page, written: Written, tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.html", tmp_path / "marked.html"
    record = written.records[0]
    began = record.rows.began + record.rows.times[len(record.rows.times) // 2]
    start = RunStart(at=began, step=3, changed=(ChangedValue("training.learning_rate", "5e-05", "3e-05"),))
    write_page(plain, [record])
    write_page(marked, [replace(record, starts=(start,))])
    drawn = []
    for path in (plain, marked):
        browser.problems.clear()
        await browser.open(path.as_uri())
        drawn.append(await browser.evaluate(FIRST_CURVE))
        assert browser.problems == []
    assert drawn[0] != drawn[1]
    told = await browser.evaluate("document.querySelector('.marks').innerText")
    assert "resumed from step 3; changed: training.learning_rate 5e-05 → 3e-05" in told
