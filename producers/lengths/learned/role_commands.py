"""`streamrl lengths`: fits rankers of output length to recorded trajectories."""

from pathlib import Path
from typing import Annotated

import typer

lengths = typer.Typer(help="Fit a ranker of output lengths to recorded trajectories.", no_args_is_help=True)


@lengths.callback()
def _group() -> None:
    """Fit a ranker of output lengths to recorded trajectories."""


@lengths.command()
def fit(
    places: Annotated[
        list[Path],
        typer.Option(
            "--run", metavar="RUN", help="A run's directory, its name below runs/, or an export; may be repeated."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the next version: a run's lengths.model_dir.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Language model to fine-tune, in a directory that from_pretrained can read."),
    ] = None,
    light: Annotated[bool, typer.Option("--light", help="Fit trees instead of a language model.")] = False,
    quantile: Annotated[
        float, typer.Option(min=0.5, max=0.99, help="Share of completions that the upper estimate should cover.")
    ] = 0.9,
    test_share: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the prompts held out.")] = 0.2,
    epochs: Annotated[float, typer.Option(min=0.1, help="Passes over the prompts; only for a language model.")] = 4.0,
) -> None:
    """Fit a ranker to recorded trajectories, and score it.

    The command scores it and two baselines on held-out prompts.
    """
    from streamrl.inspection.process import log_to_stderr
    from streamrl.schemas.errors import UserError
    from streamrl.schemas.extras import require_extra

    if light == (model is not None):
        raise UserError("expected either --light or --model DIR with a language model; got both or neither")
    if light:
        require_extra("learned", "`streamrl lengths fit --light`")
    from streamrl.producers.lengths.learned.role_fitting import fit_lengths

    log_to_stderr()
    raise typer.Exit(fit_lengths(places, out, model, quantile, test_share, epochs))
