"""The charts' scripts and styles, and how to embed them in a page that may load nothing.

Invariant embedded_uplot_has_its_licence: an embedded uPlot always comes with its licence.
"""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parent / "page"
UPLOT = Path(__file__).parent / "uplot"
MODULES = ("elements.js", "words.js", "plot.js", "curves.js", "ages.js", "lengths.js", "lanes.js")
"""Our modules, each after the modules that it imports."""
LINKS = re.compile(r"^import .*\n|^export ", re.MULTILINE)
"""Imports and exports, which link modules. Each is on one line and without ``as``."""


def embedded_script(own: Iterable[Path]) -> str:
    """One module with uPlot, our charts, and a page's own modules, which imports nothing."""
    modules = [*(PAGE / name for name in MODULES), *own]
    return _licensed("uPlot.iife.min.js") + "".join(LINKS.sub("", path.read_text()) for path in modules)


def embedded_style(own: Path) -> str:
    """The styles of uPlot, of our charts and of a page, as one text."""
    return _licensed("uPlot.min.css") + (PAGE / "charts.css").read_text() + own.read_text()


def _licensed(name: str) -> str:
    return f"/*!\n{(UPLOT / 'LICENSE').read_text()}*/\n{(UPLOT / name).read_text()}\n"
