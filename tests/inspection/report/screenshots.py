"""Takes the pictures of the documentation: ``python -m tests.inspection.report.screenshots docs/images RUN RUN``.

The first run's report, and both runs compared; runs are directories that real runs left.
"""

import asyncio
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from inspection.report.command import find_run, names_of
from inspection.report.page import write_page
from inspection.report.record import read_record
from tests.inspection.dashboard.browser import browser_page, chromium

WIDTH, MOST = 1280, 3300


async def take(folder: Path, runs: Sequence[Path]) -> None:
    """The one in the light scheme, the other in the dark."""
    executable = chromium()
    assert executable is not None, "expected an installed Chromium"
    folder.mkdir(parents=True, exist_ok=True)
    records = [read_record(find_run(path), name) for path, name in zip(runs, names_of(runs), strict=True)]
    with tempfile.TemporaryDirectory() as scratch:
        async with browser_page(executable) as page:
            for name, shown, scheme in (("report", records[:1], "light"), ("comparison", records, "dark")):
                path = Path(scratch) / f"{name}.html"
                write_page(path, shown)
                await page.size(WIDTH, 900)
                await page.prefer(scheme)
                await page.open(path.as_uri())
                height = int(await page.evaluate("document.documentElement.scrollHeight"))
                await page.size(WIDTH, min(MOST, height))
                await asyncio.sleep(0.3)
                with Image.open(io.BytesIO(await page.picture())) as picture:
                    picture.convert("RGB").save(folder / f"{name}.webp", quality=85, method=6)
            print("\n".join(page.problems) or "no complaint")


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]]))
