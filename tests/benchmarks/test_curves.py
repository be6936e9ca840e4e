import json
import xml.etree.ElementTree as ElementTree

from benchmarks.curves import PICTURE, RESULTS, drawn
from consumers.algorithms.settings import PRESETS

CURVES = json.loads(RESULTS.read_text())["curves"]


def test_the_picture_shows_the_measured_curves() -> None:
    assert PICTURE.read_text() == drawn(CURVES), "python -m benchmarks.curves"


def test_every_algorithm_of_the_shelf_has_a_panel_with_all_its_steps_and_learns() -> None:
    assert {curve["name"] for curve in CURVES} == set(PRESETS)
    picture = ElementTree.fromstring(drawn(CURVES))  # noqa: S314
    lines = picture.findall(".//{*}polyline")
    assert len(lines) == len(CURVES)
    for line, curve in zip(lines, CURVES, strict=True):
        heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
        assert len(heights) == len(curve["rewards"])
        # In a picture up is down: the reward rises.
        assert heights[-1] < heights[0] - 40
