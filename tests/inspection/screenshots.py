"""Takes the manual's pictures, of real runs: ``python -m tests.inspection.screenshots docs/images [--KEY VALUE]``.

It runs `streamrl demo` twice, with seeds 0 and 1 under the names demo and demo-seed-1, looks at the first while it
trains, through `streamrl ui` in Chromium and through `streamrl top`, and draws both runs' reports at their end. What
follows the folder are settings of both demos; ``--training.max_steps 20`` makes it short.
"""

import asyncio
import io
import os
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from PIL import Image

from streamrl.inspection.diagnostics.connect import connect
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.report.command import find_run, names_of
from streamrl.inspection.report.page import write_page
from streamrl.inspection.report.record import read_record
from streamrl.inspection.terminal.app import TopApp
from streamrl.inspection.terminal.command import read_trajectory
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.features import run_parts
from streamrl.settings.loading import load_settings
from tests.inspection.dashboard.browser import Page, browser_page, chromium

WIDTH, HEIGHT, SHEET_HEIGHT = 1480, 2000, 1000
REPORT_WIDTH, REPORT_HEIGHT = 1280, 3300
SETTLE_S = 3.0
LOOK_AT = 0.6
"""Share of the steps after which the run is looked at: curves have a shape by then, and there is time left."""
PATIENCE_S = 1800.0
"""Viewers run at the lowest priority, so that on a busy machine they take minutes to come up."""
TRAINED = """(() => {
  const every = [...document.querySelectorAll('#trajectories tbody tr')];
  const rows = every.filter((row) => row.querySelector('.chip.good'));
  const row = rows.find((row) => row.cells[3].textContent.includes('→')) ?? rows[0];
  row?.querySelector('button.id').click();
  return row !== undefined;
})()"""
"""Opens the inspector with a trained trajectory, one that two versions sampled if the page lists any."""
CLI = [sys.executable, "-m", "streamrl"]


async def take(folder: Path, overrides: Sequence[str]) -> None:
    """Everything, one picture after the other."""
    executable = chromium()
    assert executable is not None, "expected an installed Chromium: apt-get install -y chromium"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streamrl-pictures-", ignore_cleanup_errors=True) as scratch:
        runs = Path(scratch)
        async with _demo(runs, "demo", 0, overrides) as run, browser_page(executable) as page:
            await _stepped(run, 0.0)
            async with _viewer(run) as address:
                await page.size(WIDTH, HEIGHT)
                await page.open(address)
                await _stepped(run, LOOK_AT)
                await _dashboard(page, folder)
                await _terminal(run, folder / "top.svg")
        async with _demo(runs, "demo-seed-1", 1, overrides):
            pass
        async with browser_page(executable) as page:
            await _reports(page, [runs / "demo", runs / "demo-seed-1"], folder)


@asynccontextmanager
async def _demo(runs: Path, name: str, seed: int, overrides: Sequence[str]) -> AsyncIterator[Path]:
    """The directory of a demo that runs; its end is waited for. What it printed lies beside it."""
    command = [*CLI, "demo", f"--seed={seed}", f"--run.name={name}", f"--run.directory={runs}", *overrides]
    with (runs / f"{name}.out").open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=STDOUT)
    try:
        yield runs / name
        async with asyncio.timeout(PATIENCE_S):
            code = await process.wait()
        assert code == 0, (runs / f"{name}.out").read_text()[-2000:]
    finally:
        await _interrupted(process)


async def _interrupted(process: Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 60)


async def _stepped(run: Path, share: float) -> None:
    """Wait until so much of the run's steps are done."""
    metrics = run / "metrics.jsonl"
    async with asyncio.timeout(PATIENCE_S):
        while not metrics.exists():
            await asyncio.sleep(0.5)
        wanted = 1 + share * load_settings(run / "config.resolved.toml", []).training.max_steps
        while len(metrics.read_text().splitlines()) < wanted:
            await asyncio.sleep(0.5)


@asynccontextmanager
async def _viewer(run: Path) -> AsyncIterator[str]:
    """The address at which `streamrl ui` shows the run."""
    command = [*CLI, "ui", f"--run={run}", "--port=0", "--no-open"]
    viewer = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        assert viewer.stdout is not None
        line = (await asyncio.wait_for(viewer.stdout.readline(), PATIENCE_S)).decode()
        found = re.search(r"http://\S+", line)
        assert found is not None, f"expected an address from streamrl ui, got {line!r}"
        yield found[0]
    finally:
        await _interrupted(viewer)


async def _dashboard(page: Page, folder: Path) -> None:
    """Both schemes, of the page and of the inspector."""
    await page.until("document.querySelectorAll('#trajectories tbody tr').length > 20", 120)
    for scheme in ("light", "dark"):
        await page.size(WIDTH, HEIGHT)
        await page.prefer(scheme)
        await asyncio.sleep(SETTLE_S)
        await _keep(page, folder / f"dashboard-{scheme}.webp")
        await page.size(WIDTH, SHEET_HEIGHT)
        await page.until(TRAINED, 120)
        await page.until("document.querySelector('.life') !== null", 60)
        await asyncio.sleep(SETTLE_S)
        await _keep(page, folder / f"inspector-{scheme}.webp")
        await page.evaluate("document.getElementById('ins-close').click()")
    print("\n".join(page.problems) or "no complaint")


SIZE = (160, 46)
CELL_WIDTH, LINE, BASELINE = 12.2, 24.4, 18.5
"""Of Rich's SVG, whose lines stand further apart than its characters are high."""
TEXT = re.compile(r'<text class="([^"]+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}
UPWARD, RIGHTWARD = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉"


async def _terminal(run: Path, path: Path) -> None:
    """The first tab of `streamrl top`, with the run's past read."""
    connection = await connect(run, None).with_run()
    stop, state = asyncio.Event(), RunState(connection.run, parts=run_parts(connection.run))
    feed = await feed_of(connection, state, "streamrl-pictures", lambda: 1.0)
    reading = asyncio.create_task(feed.run(stop))

    async def read(place: str) -> Trajectory:
        return await read_trajectory(connection, place)

    try:
        app = TopApp(state, read, f"runs/{connection.run}", time.time)
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause(4 * SETTLE_S)
            path.write_text(with_whole_blocks(app.export_screenshot(simplify=True)))
    finally:
        stop.set()
        await reading


def with_whole_blocks(svg: str) -> str:
    """Block characters as rectangles that fill their cells, as a terminal draws them; no font from elsewhere."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return TEXT.sub(lambda found: _blocks(*found.groups()) or found[0], svg)


def _blocks(style: str, x: str, y: str, text: str) -> str:
    characters = text.replace("&#160;", " ")
    if not set(characters) <= {*UPWARD, *RIGHTWARD, *SHADES} or not characters.strip():
        return ""
    top, rectangles, index = float(y) - BASELINE, [], 0
    while index < len(characters):
        each, count = characters[index], 1
        while characters[index : index + count + 1] == each * (count + 1) and each not in RIGHTWARD[1:]:
            count += 1
        wide = CELL_WIDTH * (RIGHTWARD.index(each) / 8 if each in RIGHTWARD[1:] else count)
        high = LINE * (UPWARD.index(each) / 8 if each in UPWARD else 1)
        if each != " ":
            place = f'x="{float(x) + CELL_WIDTH * index:.1f}" y="{top + LINE - high:.2f}"'
            size = f'width="{wide:.1f}" height="{high:.2f}" fill-opacity="{SHADES.get(each, 1)}"'
            rectangles.append(f'<rect class="{style}" {place} {size} shape-rendering="crispEdges"/>')
        index += count
    return "".join(rectangles)


async def _reports(page: Page, runs: Sequence[Path], folder: Path) -> None:
    """The first run's report in the light scheme, and both compared in the dark one."""
    records = [read_record(find_run(path), name) for path, name in zip(runs, names_of(runs), strict=True)]
    for name, shown, scheme in (("report", records[:1], "light"), ("comparison", records, "dark")):
        path = runs[0].parent / f"{name}.html"
        write_page(path, shown)
        await page.size(REPORT_WIDTH, 900)
        await page.prefer(scheme)
        await page.open(path.as_uri())
        height = int(await page.evaluate("document.documentElement.scrollHeight"))
        await page.size(REPORT_WIDTH, min(REPORT_HEIGHT, height))
        await asyncio.sleep(SETTLE_S)
        await _keep(page, folder / f"{name}.webp")
    print("\n".join(page.problems) or "no complaint")


async def _keep(page: Page, path: Path) -> None:
    """As WebP, at a third of the size of PNG."""
    with Image.open(io.BytesIO(await page.picture())) as picture:
        picture.convert("RGB").save(path, quality=87, method=6)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(take(Path(sys.argv[1]), sys.argv[2:]))
