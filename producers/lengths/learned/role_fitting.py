"""Fits a length model to recorded completions, and says how good it is on held-out prompts.

The figures are kept beside the model.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl.inspection.lengths import recorded_completions
from streamrl.producers.lengths.learned.offline import TAILS, FitReport, fit_language_model, fit_trees
from streamrl.schemas.errors import UserError
from streamrl.schemas.plain_text import plain_text

REPORT = "report.json"
WIDTH = 110
"""Columns of the table where there is no terminal to ask."""


def fit_lengths(
    places: Sequence[Path], out: Path, model: Path | None, quantile: float, test_share: float, epochs: float
) -> int:
    """Fit trees, or the language model if one is named; the exit code.

    Raises:
        UserError: nothing to read or too little, no such model, or the directory cannot be written.
    """
    completions = recorded_completions(places, _tell)
    _tell(f"{len(completions):,} completions read")
    try:
        if model is None:
            fitted = fit_trees(completions, out, quantile, test_share)
        else:
            from streamrl.producers.lengths.learned.language_model import FineTuning

            fitted = fit_language_model(completions, model, out, quantile, test_share, FineTuning(epochs=epochs))
        (out / REPORT).write_text(json.dumps(_as_json(fitted), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"expected a writable directory for the model, got {out}: {error}") from error
    _show(fitted, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(f"version {fitted.version} in {out}: fitted to {fitted.train:,} completions, judged on {fitted.test:,}")
    return 0


def _as_json(fitted: FitReport) -> dict[str, object]:
    judged = {
        who: {dataset: judgement.fields() for dataset, judgement in said.items()} for who, said in fitted.scores.items()
    }
    return {"version": fitted.version, "taught": fitted.train, "asked": fitted.test, "held_out": judged}


def _show(fitted: FitReport, console: Console) -> None:
    """Over all data sets for everyone, then by data set for the ranker, the last one."""
    table = Table(title="held-out prompts: recall of the longest, order, share below the upper estimate")
    for name in ("data set", "predictor"):
        table.add_column(name)
    for name in ("completions", *(f"recall @{share:.0%}" for share in TAILS), "Kendall tau", "coverage"):
        table.add_column(name, justify="right")
    everyone = list(fitted.scores)
    rows = [("all", who) for who in everyone]
    rows += [(dataset, everyone[-1]) for dataset in fitted.scores[everyone[-1]] if dataset != "all"]
    for dataset, who in rows:
        judgement = fitted.scores[who].get(dataset)
        if judgement is not None:
            scores = (*judgement.recall, judgement.tau, judgement.coverage)
            table.add_row(Text(plain_text(dataset)), who, f"{judgement.completions:,}", *map(_number, scores))
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
