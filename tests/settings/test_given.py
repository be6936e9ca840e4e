from pathlib import Path

import pytest

from streamrl.settings.layers import SettingsLayers, line_of

TEXT = """# a run
[run]
name = "a"

[data]
options = { min_terms = 2 }

[emulation.decode]
step_s = 0.1
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("run", "name"), 3),
        (("run",), 2),
        (("data", "options", "min_terms"), 6),
        (("emulation", "decode", "step_s"), 9),
        (("emulation", "decode", "nothing"), 8),
        (("loop", "mode"), None),
    ],
)
def test_a_key_is_found_in_its_line_or_in_that_of_its_table(key: tuple[str, ...], line: int | None) -> None:
    assert line_of(TEXT, key) == line


def test_the_last_layer_that_gives_a_key_is_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(TEXT)
    environ = {"STREAMRL_LOOP__MODE": "stream", "STREAMRL_RUN__SEED": "1"}
    given = SettingsLayers.read(path, ["--run.seed=2"], environ)
    assert [given.rank(tuple(key.split("."))) for key in ("run.name", "loop.mode", "run.seed", "loop.top_k")] == [
        *(0, 1, 2, -1)
    ]
    assert given.origin(("run", "name")) == f" ({path}, line 3)"
    assert given.origin(("loop", "mode")) == " (STREAMRL_LOOP__MODE)"
    assert given.origin(("run", "seed")) == " (--run.seed)"
    assert given.origin(("loop", "top_k")) == ""
