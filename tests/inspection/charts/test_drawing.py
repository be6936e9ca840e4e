"""The charts' modules, asked in a real browser; skipped where no Chromium is installed."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.inspection.dashboard.browser import Page, browser_page, chromium
from tests.inspection.dashboard.served import served

EXECUTABLE = chromium()
pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed, and none is downloaded"),
    pytest.mark.asyncio(loop_scope="module"),
]
CURVES = r"""(async () => {
  const { curves } = await import("/charts/curves.js"), box = document.createElement("div");
  document.body.append(box);
  curves(box, %s, { label: "made up", height: 200, over: "step" });
  await new Promise(requestAnimationFrame);
  const canvas = box.querySelector("canvas"), { width, height } = canvas, hue = [179, 38, 30];
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height), found = new Set();
  for (let at = 0; at < data.length; at += 4) {
    const alike = hue.every((part, place) => Math.abs(data[at + place] - part) < 12);
    if (alike && data[at + 3] > 200) found.add((at / 4) %% width);
  }
  const legend = box.querySelector(".u-legend").innerText.split(/\s+/).join(" ");
  box.remove();
  const columns = [...found].sort((one, other) => one - other);
  return { legend, holes: columns.filter((each, place) => place && each - columns[place - 1] > 20).length };
})()"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[Page]:
    assert EXECUTABLE is not None
    async with served(5.0) as dashboard, browser_page(EXECUTABLE) as page:
        await page.prefer("light")
        await page.size(1000, 800)
        await page.open(dashboard.address)
        yield page


def lines(*values: str) -> str:
    told = (f"{{ name: 'line {at}', hue: 'bad', x: [1, 2, 3, 4, 5, 6], y: {y} }}" for at, y in enumerate(values))
    return f"[{', '.join(told)}]"


@pytest.mark.parametrize(
    ("values", "holes"),
    [
        ("[1, 2, 3, 4, 5, 6]", 0),
        ("[1, 2, null, null, 5, 6]", 1),
        ("[1, 2, null, 4, null, 6]", 2),
    ],
)
async def test_unknown_values_are_gaps_and_a_lone_value_is_drawn(page: Page, values: str, holes: int) -> None:
    assert (await page.evaluate(CURVES % lines(values)))["holes"] == holes


async def test_lines_of_runs_whose_steps_differ_have_no_gaps(page: Page) -> None:
    drawn = lines("[1, 2, 3, 4, 5, 6]").replace("x: [1, 2, 3, 4, 5, 6]", "x: [1, 3, 5, 7, 9, 11]")
    found = await page.evaluate(CURVES % f"[...{drawn}, ...{lines('[6, 5, 4, 3, 2, 1]')}]")
    assert found == {"holes": 0, "legend": "line 0 line 0"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("short(null)", "–"),
        ("short(0)", "0"),
        ("short(0.000012)", "1.2e-5"),
        ("short(12.345)", "12.3"),
        ("short(1234.5)", "1,235"),
        ("short(45678)", "45.7k"),
        ("short(2e6)", "2M"),
        ("span(0)", "0 s"),
        ("span(0.0123)", "12 ms"),
        ("span(3.14159)", "3.14 s"),
        ("span(150)", "2 min 30 s"),
        ("span(3600)", "60 min"),
        ("span(7530)", "2 h 6 min"),
    ],
)
async def test_numbers_are_written_as_people_read_them(page: Page, said: str, expected: str) -> None:
    assert await page.evaluate(f'import("/charts/words.js").then(({{ short, span }}) => {said})') == expected


async def test_a_pixel_with_many_stretches_shows_their_shares(page: Page) -> None:
    """Half of the time one thing, half another: the lane's upper half is of the one colour, the lower of the other."""
    shares = """(async () => {
      const { Lanes } = await import("/charts/lanes.js"), box = document.createElement("div");
      document.body.append(box);
      class Quiet extends Lanes { tell() {} moment() { return ""; } }
      const ticks = { incrs: [100] }, all = new Quiet(box, { height: 60, label: "made up", ticks, view: [0, 100] });
      const stretches = [...Array(8000).keys()].map((at) => [at / 80, (at + 1) / 80, at % 2 ? "train" : "publish"]);
      all.hold([{ name: "trainer", rest: null, stretches, marks: [] }]);
      await new Promise(requestAnimationFrame);
      const pen = box.querySelector("canvas").getContext("2d");
      const seen = [20, 8].map((y) => [...pen.getImageData(500, y, 1, 1).data]);
      box.remove();
      return seen;
    })()"""
    assert await page.evaluate(shares) == [[106, 79, 208, 255], [201, 116, 10, 255]]


async def test_before_the_oldest_stretch_that_is_known_a_lane_shows_and_says_nothing(page: Page) -> None:
    """Of a long run only the newest stretches are kept: a process did not wait in the time before them."""
    lane = """(async () => {
      const { Lanes } = await import("/charts/lanes.js"), box = document.createElement("div");
      document.body.append(box);
      class Quiet extends Lanes { tell() {} moment() { return ""; } }
      const all = new Quiet(box, { height: 60, label: "made up", ticks: { incrs: [100] }, view: [0, 100] });
      const told = { name: "trainer", rest: "wait", since: %s, stretches: [[60, 80, "train", 1]], marks: [] };
      all.hold([told]);
      await new Promise(requestAnimationFrame);
      const canvas = box.querySelector("canvas"), pen = canvas.getContext("2d"), { left, width } = all.plot.bbox;
      const drawn = [30, 70, 90].map((at) => pen.getImageData(left + at / 100 * width, 12, 1, 1).data[3] > 0);
      box.remove();
      return [drawn, [30, 70, 90].map((at) => all.words(told, at))];
    })()"""
    known = ["trainer · forward, backward for 20 s · step 1", "trainer · waits"]
    assert await page.evaluate(lane % "60") == [[False, True, True], ["trainer", *known]]
    assert await page.evaluate(lane % "undefined") == [[True, True, True], ["trainer · waits", *known]]
