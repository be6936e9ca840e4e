"""A real headless Chromium, driven over its DevTools protocol; nothing is downloaded."""

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.progress import patience, within

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_S = 30.0
AXE = Path(__file__).parent / "axe" / "axe.min.js"


def chromium() -> str | None:
    """Where it is installed, if it is."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Page:
    """One tab. ``problems``: what its console and its policies complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.loaded = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if (future := self._waiting.pop(told.get("id", -1), None)) is not None and not future.done():
                future.set_result(told)
            self._note(told.get("method", ""), told.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(told["args"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"] + " " + told["entry"].get("url", ""))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol."""
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        told = await within(future, 90)
        assert "error" not in told, f"{method}: {told['error']}"
        result: dict[str, Any] = told["result"]
        return result

    async def open(self, address: str) -> None:
        """Go there and wait until it is loaded."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.loaded.clear()
        await self.call("Page.navigate", url=address)
        await within(self.loaded.wait(), 30)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, json.dumps(told["exceptionDetails"])[:800]
        return told["result"].get("value")

    async def until(self, script: str, timeout_s: float = 15.0) -> None:
        """Wait until an expression holds."""
        async with patience(timeout_s):
            while not await self.evaluate(script):
                await asyncio.sleep(0.05)

    async def prefer(self, scheme: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """Of the window, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)

    async def press(self, key: str) -> None:
        """A key, down and up."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        extra = {"text": "\r"} if key == "Enter" else {}
        if key in codes:
            extra["windowsVirtualKeyCode"] = codes[key]  # type: ignore[assignment]
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **extra)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    async def point_at(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse over an element, to these shares of its width and height."""
        await self._mouse("mouseMoved", await self._place(selector, x, y))

    async def drag(self, selector: str, start: float, end: float) -> None:
        """Press the mouse over an element, and let it go further right or left; in shares of its width."""
        begin, goal = await self._place(selector, start), await self._place(selector, end)
        for kind, at in (("mousePressed", begin), ("mouseMoved", goal), ("mouseReleased", goal)):
            await self._mouse(kind, at, button="left", buttons=1, clickCount=1)

    async def wheel(self, selector: str, pixels: float) -> None:
        """Turn the wheel over an element's middle."""
        await self._mouse("mouseWheel", await self._place(selector), deltaX=0, deltaY=pixels)

    async def _place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        box = await self.evaluate(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)});"
            " it.scrollIntoView({block: 'center'}); return it.getBoundingClientRect().toJSON(); })()"
        )
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    async def _mouse(self, kind: str, at: tuple[float, float], **more: Any) -> None:
        await self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

    async def computed_s(self) -> float:
        """Seconds that the page's main thread has computed, once ``Performance`` is enabled."""
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    async def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browser_page(executable: str) -> AsyncIterator[Page]:
    """A fresh browser with one tab; it and its profile are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="streamrl-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(await _tab(session, Path(profile)), max_msg_size=0) as socket,
            ):
                page = Page(socket)
                yield page
                page.reader.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


async def _tab(session: aiohttp.ClientSession, profile: Path) -> str:
    note = profile / "DevToolsActivePort"
    async with patience(START_S):
        while not (note.exists() and note.read_text().strip()):
            await asyncio.sleep(0.05)
        port = note.read_text().split()[0]
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    for target in await answer.json():
                        if target["type"] == "page":
                            return str(target["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)


async def expect_no_serious_issue(page: Page) -> None:
    """axe finds no serious issue on what the page shows now."""
    await page.evaluate(AXE.read_text() + "; true")
    found = await page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations"
        ".filter((each) => ['serious', 'critical'].includes(each.impact))"
        ".map((each) => [each.id, each.nodes.slice(0, 4).map((node) => node.html + node.failureSummary)]))"
    )
    assert found == [], json.dumps(found, indent=1)
