import re
from pathlib import Path

from tests.architecture.shape import code_map
from tests.architecture.sources import ROOT
from tests.architecture.trajectory_way import measured

PAGE = ROOT / "docs" / "code-map.md"
ELSEWHERE = {"producers/rewards/child.py"}
"""Runs in a process of its own."""
DECLARES = {"producers/generation/engines/port.py"}
"""Has dataclasses and protocols only, and no function that could be called."""


def test_every_file_that_the_map_names_exists() -> None:
    named = re.findall(r"`([\w/]+/[\w.]+\.(?:py|js))`", PAGE.read_text())
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


async def test_the_map_is_the_way_that_a_trajectory_takes(tmp_path: Path, bootstrap_servers: str) -> None:
    way, beside = set(code_map(ROOT)[0]), set(_beside())
    found = await measured(tmp_path, bootstrap_servers)
    assert not found.touching - way - beside, "handed a sample, and not on the map"
    assert not way - found.called - ELSEWHERE - DECLARES, "on the map, and never called"
    assert beside <= found.touching, "beside the way, and handed no sample"


def _beside() -> list[str]:
    section = PAGE.read_text().split("\n## Beside the way\n")[1].split("\n## ")[0]
    return re.findall(r"`([\w/]+\.py)`", section)
