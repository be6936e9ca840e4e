"""Takes the manual's picture: ``python -m tests.inspection.terminal.screenshot docs/images/top.svg [KEYS W H]``."""

import asyncio
import re
import sys
from pathlib import Path

from inspection.terminal.app import TopApp
from tests.inspection.terminal.made_up_state import RUN, MadeUpState

SIZE = (160, 46)
CELL_WIDTH, LINE, BASELINE = 12.2, 24.4, 18.5
"""Of Rich's SVG, whose lines stand further apart than its characters are high."""
TEXT = re.compile(r'<text class="([^"]+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}
UPWARD, RIGHTWARD = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉"


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


async def take(path: Path, keys: str, size: tuple[int, int]) -> None:
    """After these keys."""
    run = MadeUpState(200.0)
    app = TopApp(run.state, run.read, f"runs/{RUN}", run.clock)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press(*(keys.split(",") if keys else ()))
        await pilot.pause(0.6)
        path.write_text(with_whole_blocks(app.export_screenshot(simplify=True)))


if __name__ == "__main__":
    size = (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 4 else SIZE
    asyncio.run(take(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "", size))
