"""``python -m benchmarks.curves``: draws how each algorithm learns, as ``benchmarks.algorithms`` found it.

One picture is of the shelf, each algorithm for itself; the other of those that learned on one stream, left alone and
disturbed. One panel an algorithm, all on the same axes, in one SVG without fonts or scripts of its own; colours follow
the reader's light or dark scheme. Drawn by hand: a plotting library would be a dependency for one picture.
"""

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "algorithms.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHELF, LIVE = "learning-curves.svg", "live-curves.svg"
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
.beside { stroke: #d97706; stroke-width: 1.5; stroke-dasharray: 4 3; fill: none; stroke-linejoin: round }
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
    parser.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args(arguments)
    for name, picture in pictures(json.loads(options.results.read_text())).items():
        (options.images / name).write_text(picture)
        print(f"drawn: {options.images / name}")


def pictures(results: Mapping[str, Any]) -> dict[str, str]:
    """By file name, the SVG of each."""
    return {SHELF: drawn(results["curves"], "step"), LIVE: drawn(live_curves(*results["live"]), "part")}


def live_curves(alone: Mapping[str, Any], disturbed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each policy that sampled: its rewards left alone, and ``beside`` them those of the disturbed run."""
    other = {one["name"]: one.get("curve") for one in disturbed["instances"]}
    return [
        {"name": one["algorithm"], "rewards": one["curve"], "beside": other[one["name"]]}
        for one in alone["instances"]
        if "curve" in one
    ]


def drawn(curves: Sequence[Mapping[str, Any]], unit: str) -> str:
    """The SVG of these curves, each a ``name`` and its ``rewards`` by ``unit``, from 0 to 1; dashed, any ``beside``."""
    rows = -(-len(curves) // COLUMNS)
    steps = max(len(curve["rewards"]) for curve in curves)
    places = [f"translate({number % COLUMNS * WIDTH} {number // COLUMNS * HEIGHT})" for number in range(len(curves))]
    panels = [
        f'<g transform="{place}">{_panel(curve, steps, unit)}</g>' for place, curve in zip(places, curves, strict=True)
    ]
    names = ", ".join(str(curve["name"]) for curve in curves)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDTH} {rows * HEIGHT}" role="img">',
            f"<title>Mean reward by {unit} of {escape(names)}</title>",
            f"<style>{STYLE}</style>",
            *panels,
            "</svg>\n",
        ]
    )


def _panel(curve: Mapping[str, Any], steps: int, unit: str) -> str:
    rewards = [float(reward) for reward in curve["rewards"]]
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: int, reward: float) -> tuple[float, float]:
        return LEFT + across * step / max(1, steps - 1), TOP + down * (1.0 - reward)

    def line(kind: str, values: Sequence[float]) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in itertools.starmap(place, enumerate(values)))
        return f'<polyline class="{kind}" points="{points}"/>'

    last_x, last_y = place(len(rewards) - 1, rewards[-1])
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
            f'<text x="{LEFT + across}" y="{HEIGHT - 8}" text-anchor="end">{unit} {steps}</text>',
            *([line("beside", curve["beside"])] if curve.get("beside") else []),
            line("curve", rewards),
            f'<circle class="end" cx="{last_x:.1f}" cy="{last_y:.1f}" r="3"/>',
        ]
    )


if __name__ == "__main__":
    main()
