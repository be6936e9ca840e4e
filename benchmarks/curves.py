"""``python -m benchmarks.curves``: draws how each algorithm of the shelf learns, as ``benchmarks.algorithms`` found it.

One panel an algorithm, all on the same axes, in one SVG without fonts or scripts of its own; colours follow the
reader's light or dark scheme. Drawn by hand: a plotting library would be a dependency for one picture.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "algorithms.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "learning-curves.svg"
COLUMNS = 4
WIDTH, HEIGHT = 210, 150
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 26, 24
"""Of a panel: room for labels around the plot."""
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #444 }
.name { font-weight: 600; fill: #111 }
.axis { stroke: #999; stroke-width: 1; fill: none }
.grid { stroke: #8884; stroke-width: 1 }
.curve { stroke: #2563eb; stroke-width: 2; fill: none; stroke-linejoin: round }
.end { fill: #2563eb }
@media (prefers-color-scheme: dark) {
  text { fill: #bbb } .name { fill: #eee } .axis { stroke: #777 }
  .curve { stroke: #7aa2ff } .end { fill: #7aa2ff }
}
"""


def main(arguments: list[str] | None = None) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    curves = json.loads(options.results.read_text())["curves"]
    options.picture.write_text(drawn(curves))
    print(f"drawn: {len(curves)} curves in {options.picture}")


def drawn(curves: Sequence[Mapping[str, Any]]) -> str:
    """The SVG of these curves, each a ``name`` and its ``rewards`` by step, from 0 to 1."""
    rows = -(-len(curves) // COLUMNS)
    steps = max(len(curve["rewards"]) for curve in curves)
    panels = [
        f'<g transform="translate({number % COLUMNS * WIDTH} {number // COLUMNS * HEIGHT})">{_panel(curve, steps)}</g>'
        for number, curve in enumerate(curves)
    ]
    names = ", ".join(str(curve["name"]) for curve in curves)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDTH} {rows * HEIGHT}" role="img">',
            f"<title>Mean reward by optimizer step of {escape(names)}</title>",
            f"<style>{STYLE}</style>",
            *panels,
            "</svg>\n",
        ]
    )


def _panel(curve: Mapping[str, Any], steps: int) -> str:
    rewards = [float(reward) for reward in curve["rewards"]]
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: int, reward: float) -> tuple[float, float]:
        return LEFT + across * step / max(1, steps - 1), TOP + down * (1.0 - reward)

    points = [place(step, reward) for step, reward in enumerate(rewards)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    grid = [
        f'<line class="grid" x1="{LEFT}" x2="{LEFT + across}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in (TOP, TOP + down / 2)
    ]
    labels = [
        f'<text x="{LEFT - 6}" y="{place(0, value)[1] + 4:.1f}" text-anchor="end">{value:g}</text>'
        for value in (0.0, 0.5, 1.0)
    ]
    return "".join(
        [
            f'<text class="name" x="{LEFT}" y="16">{escape(str(curve["name"]))}</text>',
            f'<text x="{LEFT + across}" y="16" text-anchor="end">{rewards[0]:.2f} → {rewards[-1]:.2f}</text>',
            *grid,
            *labels,
            f'<path class="axis" d="M{LEFT} {TOP}V{TOP + down}H{LEFT + across}"/>',
            f'<text x="{LEFT}" y="{HEIGHT - 8}">1</text>',
            f'<text x="{LEFT + across}" y="{HEIGHT - 8}" text-anchor="end">step {steps}</text>',
            f'<polyline class="curve" points="{line}"/>',
            f'<circle class="end" cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3"/>',
        ]
    )


if __name__ == "__main__":
    main()
