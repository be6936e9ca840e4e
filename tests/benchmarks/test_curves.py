import json
import xml.etree.ElementTree as ElementTree

from benchmarks.curves import IMAGES, RESULTS, drawn, live_curves, pictures
from streamrl.consumers.algorithms.settings import PRESETS

FOUND = json.loads(RESULTS.read_text())
CURVES = FOUND["curves"]


def test_the_pictures_show_the_measured_curves() -> None:
    for name, picture in pictures(FOUND).items():
        assert (IMAGES / name).read_text() == picture, "python -m benchmarks.curves"


def test_a_policy_of_the_stream_has_both_of_its_curves_in_one_panel() -> None:
    curves = live_curves(*FOUND["live"])
    assert {curve["name"] for curve in curves} == {"grpo", "ppo", "rloo", "dpo"}
    panels = ElementTree.fromstring(drawn(curves, "part")).findall("{*}g")  # noqa: S314
    assert [len(panel.findall("{*}polyline")) for panel in panels] == [2] * len(curves)


def test_every_algorithm_of_the_shelf_has_a_panel_with_all_its_steps_and_learns() -> None:
    assert {curve["name"] for curve in CURVES} == set(PRESETS)
    picture = ElementTree.fromstring(drawn(CURVES, "step"))  # noqa: S314
    lines = picture.findall(".//{*}polyline")
    assert len(lines) == len(CURVES)
    for line, curve in zip(lines, CURVES, strict=True):
        heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
        assert len(heights) == len(curve["rewards"])
        # In a picture up is down: the reward rises.
        assert heights[-1] < heights[0] - 40
