import json
import re
from pathlib import Path

import pytest

from docs.figures import GUARDED, ROOT, FigureError, Figures, complaints, published, unsourced

RESULTS = {
    "host": {"cores": 2, "load": None},
    "rows": [
        {"path": "redis", "batched": False, "tokens": 200, "ratio": 5.587, "range": [1, 20000], "share": 0.0129},
        {
            "path": "redis",
            "name": "ours, pipelined",
            "batched": True,
            "tokens": 200,
            "ratio": 1.2,
            "range": [3, 4],
            "share": 0.5,
        },
    ],
}


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    (tmp_path / "made.json").write_text(json.dumps(RESULTS))
    return Figures(tmp_path)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("made.json.rows[path=redis,batched=false].ratio as .1f", "5.6"),
        ("max made.json.rows[tokens=200].ratio as .2f", "5.59"),
        ("mean made.json.rows[tokens=200].range[1] as ,.0f", "10,002"),
        ("made.json.rows[0].share * 100 as .1f", "1.3"),
        ("made.json.rows[0].share as .1%", "1.3%"),
        ("made.json.rows[0].ratio / made.json.rows[1].ratio as .1f", "4.7"),
        ("made.json.host.cores as d", "2"),
        ("made.json.rows[name=ours, pipelined,tokens=200].ratio as .1f", "1.2"),
    ],
)
def test_a_source_is_what_it_says(figures: Figures, source: str, shown: str) -> None:
    assert figures.renewed(f"it is {shown}<!--= {source} --> here") == f"it is {shown}<!--= {source} --> here"
    assert not figures.differences


def test_a_figure_that_differs_from_its_source_is_refused(figures: Figures) -> None:
    source = "<!--= made.json.rows[0].ratio as .1f -->"
    assert figures.renewed(f"**5.7{source}** times, not 7") == f"**5.6{source}** times, not 7"
    assert figures.differences == ["made.json.rows[0].ratio as .1f is 5.6, the page says 5.7"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("made.json.rows[9].ratio as .1f", "IndexError"),
        ("made.json.rows[0].nothing as .1f", "KeyError"),
        ("none.json.rows as d", "expected results in none.json"),
        ("made.json.rows[tokens=200].ratio as .1f", "expected one figure, got 2"),
        ("made.json.rows[tokens=7].ratio as .1f", "expected one figure, got 0"),
        ("made.json/rows as d", "expected .name"),
    ],
)
def test_a_source_that_there_is_not_is_refused(figures: Figures, source: str, complaint: str) -> None:
    with pytest.raises(FigureError, match=re.escape(complaint)):
        figures.renewed(f"5.6<!--= {source} -->")


def test_rows_are_written_below_the_head(figures: Figures) -> None:
    head = "| path | batched | ratio |\n|---|---|---:|\n"
    opening = "<!--= rows made.json.rows[path=redis]\n| {path} | {batched} | {ratio:.1f} ({range[1]:,}) |\n-->\n"
    renewed = figures.renewed(f"{opening}{head}| stale | 9 |\n\n<!--= end -->\nafter 7")
    assert (
        renewed == f"{opening}{head}| redis | no | 5.6 (20,000) |\n| redis | yes | 1.2 (4) |\n\n<!--= end -->\nafter 7"
    )
    assert figures.differences == ["the rows of made.json.rows[path=redis] differ"]
    assert figures.renewed(renewed) == renewed
    assert len(figures.differences) == 1


def test_a_single_thing_and_a_list_are_rows_too(figures: Figures) -> None:
    page = "<!--= rows made.json.host\n- {cores} cores, load {load:.1f}.\n-->\n<!--= end -->"
    renewed = figures.renewed(page)
    assert "\n- 2 cores, load .\n" in renewed
    assert figures.renewed(renewed) == renewed


def test_a_figure_without_a_source_is_refused() -> None:
    sourced = "1.3<!--= made.json.host.cores as d -->"
    row = f"| p99 of `x 7` | [{sourced} ms](page-9.md), 2<!--= given --> cores |"
    page = f"# A\n\n## Measured\n\n{row}\n{{}}\n## B\n| 5 |\n"
    assert not list(unsourced(page.format(""), "Measured"))
    assert list(unsourced(page.format(f"| {sourced} of 4.2 ms | a |"), "Measured")) == [f"{sourced} of 4.2 ms"]
    with pytest.raises(FigureError, match="expected figures with sources"):
        list(unsourced(page.format(""), "B"))
    with pytest.raises(FigureError, match="expected a section"):
        list(unsourced(page.format(""), "C"))


def test_every_page_says_what_was_measured() -> None:
    assert not list(complaints())
    assert set(GUARDED) <= {name for name, _ in published()}


def test_a_changed_figure_in_the_readme_is_refused() -> None:
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"([\d.]+)<!--= \w+\.json", text)
    assert shown is not None
    changed, figures = text.replace(shown[0], f"9{shown[0]}", 1), Figures()
    assert figures.renewed(changed) == text
    assert len(figures.differences) == 1


def test_a_changed_figure_and_one_without_a_source_among_the_headlines_are_refused() -> None:
    text = (ROOT / "benchmarks" / "headline.md").read_text()
    shown = re.search(r"([\d.]+)<!--= \w+\.json", text)
    assert shown is not None
    changed, figures = text.replace(shown[0], f"9{shown[0]}", 1), Figures()
    figures.renewed(changed)
    assert len(figures.differences) == 1
    assert f"the page says 9{shown[1]}" in figures.differences[0]
    bare = re.sub(r"<!--= \w+\.json[^>]*-->", "", text, count=1)
    assert len(list(unsourced(bare, GUARDED["benchmarks/headline.md"]))) == 1
