"""Where the charts' scripts and styles lie, and how a page that may load nothing embeds them.

Invariant the_licence_goes_along: whoever is handed an embedded uPlot is handed its licence with it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parent / "page"
UPLOT = Path(__file__).parent / "uplot"
MODULES = ("elements.js", "words.js", "plot.js", "curves.js", "ages.js", "lengths.js", "lanes.js")
"""Each after those that it imports."""
LINKS = re.compile(r"^import .*\n|^export ", re.MULTILINE)
"""What links modules with each other; of one line, and without ``as``."""


def embedded_script(own: Iterable[Path]) -> str:
    """uPlot, our charts, and a page's own modules, as one module that imports nothing."""
    modules = [*(PAGE / name for name in MODULES), *own]
    return _licensed("uPlot.iife.min.js") + "".join(LINKS.sub("", path.read_text()) for path in modules)


def embedded_style(own: Path) -> str:
    """The styles of uPlot, of our charts and of a page."""
    return _licensed("uPlot.min.css") + (PAGE / "charts.css").read_text() + own.read_text()


def _licensed(name: str) -> str:
    return f"/*!\n{(UPLOT / 'LICENSE').read_text()}*/\n{(UPLOT / name).read_text()}\n"
