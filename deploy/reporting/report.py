"""The run as one self-contained page: figures, curves, samples before and after, settings. Needs no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline

from deploy.observation.state import RunState
from deploy.reporting.curves import figures
from deploy.reporting.samples import Samples
from deploy.reporting.summary import Summary

TEMPLATE = Path(__file__).parent / "report.html.j2"


def write_report(
    path: Path,
    *,
    title: str,
    summary: Summary,
    state: RunState,
    samples: Samples,
    evaluated: Mapping[str, Sequence[Mapping[str, Any]]],
    config: str,
) -> None:
    """Write the page. ``evaluated`` holds the evaluation's samples by moment (``before``, ``after``)."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        summary=summary,
        figures=figures(state),
        plotly_js=plotly.offline.get_plotlyjs(),
        evaluated={moment: rows for moment, rows in evaluated.items() if rows},
        trajectories={"first": samples.first, "last": samples.last},
        config=config,
    )
    path.write_text(page)
