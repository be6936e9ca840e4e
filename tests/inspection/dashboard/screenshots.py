"""Takes the pictures of the documentation: ``python -m tests.inspection.dashboard.screenshots docs/images``."""

import asyncio
import io
import sys
from pathlib import Path

from PIL import Image

from observability.run_state.trajectory_summary import summary_of
from schemas.topics import TRAJECTORIES
from tests.inspection.dashboard.browser import Page, browser_page, chromium
from tests.inspection.dashboard.served import RUN, Served, served

WIDTH, HEIGHT, SHEET_HEIGHT = 1480, 2000, 1000
SETTLE_S = 1.5
ASK = "(document.getElementById('find-id').value = '{}', document.getElementById('find').requestSubmit())"


async def take(folder: Path) -> None:
    """Both schemes, of the page and of the inspector."""
    executable = chromium()
    assert executable is not None, "expected an installed Chromium"
    folder.mkdir(parents=True, exist_ok=True)
    async with served(200.0) as dashboard, browser_page(executable) as page:
        await page.size(WIDTH, HEIGHT)
        await page.open(dashboard.address)
        await page.until("document.querySelectorAll('#trajectories tbody tr').length > 20")
        for scheme in ("light", "dark"):
            await page.size(WIDTH, HEIGHT)
            await page.prefer(scheme)
            await asyncio.sleep(SETTLE_S)
            await _keep(page, folder / f"dashboard-{scheme}.webp")
            await page.size(WIDTH, SHEET_HEIGHT)
            await page.evaluate(ASK.format(_trained(dashboard)))
            await page.until("document.querySelector('.life') !== null")
            await asyncio.sleep(SETTLE_S)
            await _keep(page, folder / f"inspector-{scheme}.webp")
            await page.evaluate("document.getElementById('ins-close').click()")
            await page.evaluate("document.getElementById('find-id').value = ''")
        print("\n".join(page.problems) or "no complaint")


def _trained(dashboard: Served) -> str:
    """A trajectory that two versions sampled, as partition@offset."""
    log = dashboard.bus.log(TRAJECTORIES.full_name(RUN)).partitions
    for (partition, offset), fate in reversed(dashboard.state.fates.fates.items()):
        summary = summary_of(log[partition][offset])
        if summary and fate.startswith("trained") and summary.oldest != summary.newest and 120 < summary.length < 200:
            return f"{partition}@{offset}"
    raise AssertionError("expected a trained trajectory of two versions")


async def _keep(page: Page, path: Path) -> None:
    """As WebP, at a third of the size of PNG."""
    with Image.open(io.BytesIO(await page.picture())) as picture:
        picture.convert("RGB").save(path, quality=88, method=6)


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
