"""An export that is cut off, as Ctrl-C does it: what is there calls itself complete, or cannot be read as one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from unittest import mock

from streamrl.bus.history import BusHistory
from streamrl.inspection import export as exporting
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.export import MANIFEST, USUAL, Exporter, Format, SegmentHistory
from streamrl.schemas.errors import DataError
from tests.chaos.stops.moment import Subject
from tests.inspection.audit.written_topics import RUN
from tests.inspection.test_segments import _bus


@asynccontextmanager
async def export(root: Path, random: Random) -> AsyncIterator[Subject]:
    history, made, to = BusHistory(await _bus()), 0, root / "export"
    encodings: tuple[Format, ...] = ("parquet", "jsonl")
    encoding = random.choice(encodings)

    async def run(stop: asyncio.Event) -> None:
        nonlocal made, to
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                to = root / f"export-{made}"
                writing = asyncio.create_task(Exporter(history, RUN, Path("c"), to, encoding).export(USUAL, []))
                try:
                    await asyncio.wait({writing, stopping}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    writing.cancel()
                    while not writing.done():
                        try:
                            await asyncio.wait({writing})
                        except asyncio.CancelledError:
                            stop.set()
                if not writing.cancelled():
                    writing.result()
                    made += 1
        finally:
            stopping.cancel()
            await asyncio.wait({stopping})

    async def load() -> None:
        await asyncio.Event().wait()

    async def judge() -> list[str]:
        problems = []
        before = sorted(path.name for path in to.rglob("*"))
        await asyncio.sleep(0.05)
        if sorted(path.name for path in to.rglob("*")) != before:
            problems.append("it is still being written")
        if (to / MANIFEST).exists():
            report = await audit(SegmentHistory(to), RUN, list)
            problems += (
                [] if report.is_balanced else [f"an export that calls itself complete is not: {report.violations}"]
            )
        else:
            try:
                SegmentHistory(to)
            except DataError:
                pass
            else:
                problems.append("half an export can be read as one")
        return problems

    with mock.patch.object(exporting, "SEGMENT_RECORDS", 20):
        yield Subject(run, load, lambda: made > 0, judge)
