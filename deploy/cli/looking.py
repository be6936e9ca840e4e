"""Looks inside a run: records, standing, lag, a check-up, and traces. Reads only, and takes no part in the run."""

from pathlib import Path
from typing import Annotated

import typer

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="The run's directory, its name, or its configuration; left out: the newest run whose broker runs.",
    ),
]
Run = Annotated[str, typer.Option("--run", help="Name of the run, if the broker has several.")]
Servers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "--kafka.bootstrap_servers",
        envvar="STREAMRL_KAFKA__BOOTSTRAP_SERVERS",
        help="The broker; the run's own if left out. Security is set by STREAMRL_KAFKA__... or the configuration.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (tail, status, lag, doctor, trace):
        app.command()(command)


def tail(
    topic: Annotated[str, typer.Argument(help="trajectories, steps, skips, control ..., or a full name.")],
    where: Where = None,
    start: Annotated[
        str, typer.Option("--from", help="beginning, latest, -100, an offset, 10m, or an ISO date and time.")
    ] = "-10",
    expression: Annotated[
        str, typer.Option("--filter", help="Such as 'worker_id=worker-1 and length>500'; and, or, not, ( ), ~.")
    ] = "",
    partition: Annotated[list[int] | None, typer.Option(min=0, help="Only this partition; may be repeated.")] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, help="End after so many records.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes; Ctrl-C ends it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, arrays included.")] = False,
    run: Run = "",
    bootstrap_servers: Servers = None,
) -> None:
    """Print records of a topic, decoded, one line each; those that do not decode are shown with the reason."""
    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.attachment import attach
    from deploy.surveys.tailing.command import Wish
    from deploy.surveys.tailing.command import tail as print_records

    log_to_stderr()
    wish = Wish(topic, start, expression, partition or (), most, follow, as_json)
    raise typer.Exit(print_records(attach(where, run, bootstrap_servers), wish))


def status(where: Where = None, run: Run = "", bootstrap_servers: Servers = None, as_json: AsJson = False) -> None:
    """Say where a run stands: version, step, workers, lag per length bucket, what is in flight, trained, skipped."""
    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.attachment import attach
    from deploy.surveys.standing.commands import show_status

    log_to_stderr()
    raise typer.Exit(show_status(attach(where, run, bootstrap_servers), as_json=as_json))


def lag(
    where: Where = None,
    interval: Annotated[float, typer.Option(min=0, max=60, help="Seconds in which rates are measured.")] = 2.0,
    run: Run = "",
    bootstrap_servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Say how far every consumer is behind: by partition and length bucket, in records, in rates, in seconds."""
    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.attachment import attach
    from deploy.surveys.standing.commands import show_lag

    log_to_stderr()
    raise typer.Exit(show_lag(attach(where, run, bootstrap_servers), interval, as_json=as_json))


def doctor(where: Where = None, run: Run = "", bootstrap_servers: Servers = None, as_json: AsJson = False) -> None:
    """Check what a run needs: broker, topics, sizes, codecs, clocks, disk, engine, GPU; says how to mend each.

    Exit code 2 if something fails.
    """
    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.checkup.command import check_up

    log_to_stderr()
    raise typer.Exit(check_up(where, run, bootstrap_servers, as_json=as_json))


def trace(
    name: Annotated[str, typer.Argument(help="A trajectory such as chain_sum/0/0/3, a group, or a trace id.")],
    where: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="The run's directory or name; left out: the newest that has traces."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what became of a prompt, from its order to the weights it led to; needs telemetry.traces = "file"."""
    from deploy.inspection.logs import log_to_stderr
    from deploy.telemetry.reading.command import show_trace

    log_to_stderr()
    show_trace(name, where, as_json=as_json)
