import re
from pathlib import Path

from streamrl.inspection.charts.assets import MODULES, PAGE, UPLOT, embedded_script, embedded_style


def test_embedded_uplot_has_its_licence(tmp_path: Path) -> None:
    own = tmp_path / "own.css"
    own.write_text("body { margin: 0; }")
    licence = (UPLOT / "LICENSE").read_text()
    for text, library in ((embedded_script([]), "uPlot.iife.min.js"), (embedded_style(own), "uPlot.min.css")):
        assert text.index(licence) < text.index((UPLOT / library).read_text())


def test_an_embedded_script_imports_nothing_and_ends_with_the_page_s_own(tmp_path: Path) -> None:
    own = tmp_path / "own.js"
    own.write_text('import { el } from "/charts/elements.js";\nexport const drawn = el("p");\n')
    script = embedded_script([own])
    assert script.endswith('\nconst drawn = el("p");\n')
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert "</script" not in script


def test_modules_stand_after_those_that_they_import() -> None:
    assert {path.name for path in PAGE.glob("*.js")} == set(MODULES)
    for place, name in enumerate(MODULES):
        imported = re.findall(r'^import .* from "\./(.*)";$', (PAGE / name).read_text(), re.MULTILINE)
        assert set(imported) <= set(MODULES[:place])
