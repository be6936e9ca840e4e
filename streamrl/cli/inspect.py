"""Commands that look at runs, over or under way. All but `dlq retry` only read."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.arguments import RunName, Servers, Where
from streamrl.inspection.process import (
    DISPLAY_NICENESS,
    NICENESS,
    enter_own_session,
    log_to_stderr,
    lower_priority,
    say_at_once,
    use_one_thread,
)
from streamrl.schemas.errors import UserError

PastRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's directory, its name under runs/, or its configuration file.")
]
Export = Annotated[Path | None, typer.Option(metavar="DIR", help="Read exported segments instead of a broker.")]


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    for command in (tail, status, lag, doctor, trace, ui, top, report, audit, export, replay, show):
        app.command()(command)
    app.add_typer(dlq, name="dlq")


# `streamrl audit`: whether every trajectory of a run was trained once, skipped for a reason, or is pending.


def audit(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="The run's directory, its name under runs/, or its configuration file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Audit exported segments instead of a broker's topics.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Beside the run until it is finished, reading only what is new.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="With --follow: seconds between two lines.")] = 10.0,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="With --follow: end with exit code 4 as soon as it does not hold.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65_000, help="With --follow: serve figures for Prometheus here, or at the next port."),
    ] = None,
) -> None:
    """Prove produced = trained + skipped(reason) + pending.

    From topics and checkpoints alone, also while the run goes on. Exit code 4 if that does not hold; the first line
    then names the first trajectory that breaks it. With --follow what was seen is kept in the run's directory, and
    holds when the topics have forgotten it.
    """
    if follow and (run is None or export is not None):
        raise UserError("expected a run to follow, got none; name its directory or its name, and no --export")
    # At the lowest priority a follower beside a run that leaves nothing would be minutes behind, and warn as late.
    _give_way_to(run, DISPLAY_NICENESS if follow else NICENESS)
    if follow and run is not None:
        from streamrl.inspection.audit.following import FollowOptions, follow_run

        log_to_stderr()
        options = FollowOptions(interval, as_json=as_json, fail_fast=fail_fast, metrics_port=metrics_port)
        raise typer.Exit(follow_run(run, options))
    from streamrl.inspection.audit.command import audit_run

    # Here and below: standard output is the result alone, so that it can be piped.
    log_to_stderr()
    # Typer takes a code from ``Exit`` only; one that a command returns is dropped.
    raise typer.Exit(audit_run(run, export, as_json=as_json))


def _give_way_to(run: Path | None, niceness: int) -> None:
    """Before anything heavy is imported: half of a short audit's work is its imports.

    Not where a run's own broker has to be started first: it would inherit that, and be slow to come on a busy machine.
    """
    use_one_thread()  # before any import that loads numpy, which reads the number of threads once
    from streamrl.inspection.source import directory_of, nodes_of, own_broker

    if run is None or (directory := directory_of(run)) is None:
        return
    if own_broker(directory) is not None or not nodes_of(directory):
        lower_priority(niceness)


# `streamrl dlq`: the records that no decoder took.

dlq = typer.Typer(help="Look at dead letters, and send them once more.", no_args_is_help=True)


@dlq.command()
def ls(
    run: PastRun,
    error_class: Annotated[str | None, typer.Option(help="Only this class of error, such as MalformedFrame.")] = None,
    since: Annotated[str | None, typer.Option(help="Only those since: 30m, 2h, 1d, or an ISO date and time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    export: Export = None,
) -> None:
    """List dead letters: when, from where, why, how large."""
    from streamrl.inspection.dead_letters import list_dead_letters

    log_to_stderr()
    raise typer.Exit(list_dead_letters(run, export, error_class, since, json_lines=as_json))


# Named in full, since this module has a ``show`` of trajectories as well.
@dlq.command("show")
def dlq_show(
    run: PastRun,
    offset: Annotated[int, typer.Argument(min=0, help="Of the letter, as `ls` shows it.")],
    export: Export = None,
) -> None:
    """Print a dead letter: headers, first bytes, what decodes now."""
    from streamrl.inspection.dead_letters import show_dead_letter

    log_to_stderr()
    raise typer.Exit(show_dead_letter(run, export, offset))


# Without ``--export``: it writes, and files take no records.
@dlq.command()
def retry(
    run: PastRun,
    offsets: Annotated[list[int] | None, typer.Argument(min=0, help="Of the letters, as `ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Send also what still does not decode.")] = False,
) -> None:
    """Publish dead letters again where they came from.

    Those that were sent before are left alone. Exit code 1 if some were refused.
    """
    from streamrl.inspection.dead_letters import retry_dead_letters

    log_to_stderr()
    raise typer.Exit(retry_dead_letters(run, offsets or [], everything=everything, dry_run=dry_run, force=force))


# `streamrl export`: a run's topics as files that audit and replay read without a broker.


def export(
    run: PastRun,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An empty directory; the run's own export/ if left out.")
    ] = None,
    encoding: Annotated[
        Literal["parquet", "jsonl"],
        typer.Option("--format", help="Parquet also has texts, tokens and rewards as columns."),
    ] = "parquet",
    topics: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Only this topic; may be repeated; 'all' adds heartbeats and tokens."),
    ] = None,
) -> None:
    """Write a run's topics into files that need no broker.

    Records byte by byte, and a manifest with checksums; audit, replay, show and report read them with --export.
    """
    from streamrl.inspection.audit.command import export_run

    log_to_stderr()
    raise typer.Exit(export_run(run, to, encoding, topics or []))


# `streamrl replay` and `streamrl show`: looks at past steps and trajectories again, and touches nothing.

Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one a line for --steps.")]
Step = Annotated[int | None, typer.Option(min=1, help="Rebuild this step and show it in full.")]
Steps = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Rebuild these steps, both included; one line each.")
]
Lineage = Annotated[
    int | None, typer.Option(min=1, help="Follow the chain of this lineage, also where a crash undid it.")
]
Attempt = Annotated[int | None, typer.Option(min=1, help="Of a step that was refused: which attempt.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="What if: a setting of algorithm, training or batching; may be repeated. Each step starts from the "
        "original weights.",
    ),
]
Algorithm = Annotated[
    str | None, typer.Option(help="What if: another algorithm (docs/algorithms.md), with its own defaults.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="TRAJECTORY", help="What if: only these (id or partition@offset); may be repeated."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="TRAJECTORY", help="What if: without these (id or partition@offset); may be repeated."),
]
Bisect = Annotated[bool, typer.Option("--bisect", help="Find the trajectories that blew up the step.")]
Above = Annotated[
    float | None,
    typer.Option(min=0, help="Gradient norm that is too large; 10 x the median of the 20 steps before."),
]
Gradients = Annotated[
    bool, typer.Option("--per-trajectory-gradients", help="Show each trajectory's own gradient norm.")
]
FromDlq = Annotated[
    bool, typer.Option("--from-dlq", help="Decode the dead letters again; what they would have taught.")
]
Keep = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write weights, gradients and updates of the steps there.")
]
Threads = Annotated[int | None, typer.Option(min=0, help="CPU threads; the trainer's own number if left out.")]


def replay(
    run: PastRun,
    step: Step = None,
    steps: Steps = None,
    lineage: Lineage = None,
    attempt: Attempt = None,
    changes: Changes = None,
    algorithm: Algorithm = None,
    only: Only = None,
    without: Without = None,
    bisect: Bisect = False,
    above: Above = None,
    per_trajectory_gradients: Gradients = False,
    from_dlq: FromDlq = False,
    export: Export = None,
    keep: Keep = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Take past optimizer steps again, and compare.

    From what topics and checkpoints hold, in memory. Without a step: list what there is. Exit code 1 if a step does not
    come out bit-equal on the CPU.
    """
    from streamrl.inspection.replay.command import GradientOptions, ReplayRequest, StepChoice, WhatIfOptions, step_range
    from streamrl.inspection.replay.command import replay as carry_out

    log_to_stderr()
    # Before the run is opened: a wrong range of steps ends the command at once.
    request = ReplayRequest(
        run=run,
        steps=StepChoice(*step_range(step, steps), lineage, attempt),
        what_if=WhatIfOptions(tuple(changes or ()), algorithm, tuple(only or ()), tuple(without or ())),
        gradients=GradientOptions(per_trajectory_gradients, bisect, above),
        from_dlq=from_dlq,
        export=export,
        keep=keep,
        threads=threads,
        json=json,
    )
    raise typer.Exit(carry_out(request))


def show(
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="Its id, or partition@offset; or a group's id.")
    ],
    run: PastRun,
    export: Export = None,
    json: Json = False,
) -> None:
    """Print a trajectory: tokens by version, rewards, history.

    Of a group: its samples, and what became of each.
    """
    from streamrl.inspection.replay.show import show as carry_out

    log_to_stderr()
    carry_out(trajectory, run, export, json=json)


# Looks inside a run: records, standing, lag, a check-up, and traces. Reads only, and takes no part in the run.

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    run: RunName = "",
    bootstrap_servers: Servers = None,
) -> None:
    """Print the records of a topic, decoded, one line each.

    Those that do not decode are shown with the reason.
    """
    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.inspection.diagnostics.tail import TailRequest
    from streamrl.inspection.diagnostics.tail import tail as print_records

    log_to_stderr()
    wish = TailRequest(topic, start, expression, partition or (), most, follow, as_json)
    raise typer.Exit(print_records(connect(where, run, bootstrap_servers), wish))


def status(where: Where = None, run: RunName = "", bootstrap_servers: Servers = None, as_json: AsJson = False) -> None:
    """Say where a run stands: step, workers, lag, skips.

    Version, step, workers, lag by length bucket, what is in flight, trained and skipped.
    """
    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.inspection.diagnostics.status import show_status

    log_to_stderr()
    raise typer.Exit(show_status(connect(where, run, bootstrap_servers), as_json=as_json))


def lag(
    where: Where = None,
    interval: Annotated[float, typer.Option(min=0, max=60, help="Seconds in which rates are measured.")] = 2.0,
    run: RunName = "",
    bootstrap_servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Say how far each consumer is behind.

    By partition and length bucket: in records, in rates, in seconds.
    """
    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.inspection.diagnostics.lag import show_lag

    log_to_stderr()
    raise typer.Exit(show_lag(connect(where, run, bootstrap_servers), interval, as_json=as_json))


def doctor(where: Where = None, run: RunName = "", bootstrap_servers: Servers = None, as_json: AsJson = False) -> None:
    """Check what a run needs, and say how to mend what fails.

    Broker, topics, sizes, codecs, clocks, disk, engine, GPU. Exit code 2 if something fails.
    """
    from streamrl.inspection.diagnostics.doctor import run_doctor

    log_to_stderr()
    raise typer.Exit(run_doctor(where, run, bootstrap_servers, as_json=as_json))


def trace(
    name: Annotated[str, typer.Argument(help="A trajectory such as chain_sum/0/0/3, a group, or a trace id.")],
    # Not ``Where``: traces lie in files of the run, for which no broker has to run.
    where: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="The run's directory or name; left out: the newest that has traces."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what became of a prompt, span by span.

    From its order to the weights it led to; the run needs telemetry.traces = "file".
    """
    from streamrl.inspection.diagnostics.trace import show_trace

    log_to_stderr()
    show_trace(name, where, as_json=as_json)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run's directory or its name under runs/; several compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the page goes; else the run's report.html, or comparison.html here."),
    ] = None,
    reward: Annotated[
        float | None,
        typer.Option(metavar="LEVEL", help="Say when this reward was reached; else the highest that all reached."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON; no page without --out.")] = False,
    from_topics: Annotated[
        bool, typer.Option("--from-topics", help="Read the run's topics again: its broker, or its kept Kafka data.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the run's topics again, from an export of one run.")
    ] = None,
) -> None:
    """Write a run as one page, or several side by side.

    Self-contained: curves, timelines, figures, settings.
    """
    from streamrl.inspection.report.command import report as write

    log_to_stderr()
    raise typer.Exit(write(runs, out, reward, as_json=as_json, from_topics=from_topics, export=export))


# Shows a running run in a browser, or in a terminal.

DEFAULT_PORT = 8470


def ui(
    where: Where = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to listen at; others than loopback let the network in.")] = (
        "127.0.0.1"
    ),
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser; only print the address.")] = False,
    run: RunName = "",
    bootstrap_servers: Servers = None,
) -> None:
    """Show a run live in the browser.

    The loop, curves, a timeline, trajectories, dead letters. Any number may look.
    """
    say_at_once("looking for the run")
    use_one_thread()
    from streamrl.inspection.dashboard.server import serve
    from streamrl.inspection.diagnostics.connect import connect

    log_to_stderr()
    connection = connect(where, run, bootstrap_servers)
    enter_own_session()
    raise typer.Exit(serve(connection, where, host, port, open_browser=not no_open))


def top(
    where: Where = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two lines.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one line and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object an interval.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, also on a terminal.")] = False,
    run: RunName = "",
    bootstrap_servers: Servers = None,
) -> None:
    """Show a run live in the terminal.

    The loop, curves, lengths, workers, trajectories, events. Any number may look. Where there is no terminal, it prints
    a line an interval until the run is finished.
    """
    say_at_once("looking for the run")
    use_one_thread()
    import sys

    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.inspection.terminal.command import LineOptions, show_top

    log_to_stderr()
    connection = connect(where, run, bootstrap_servers)
    if not once:
        enter_own_session()
    # The view needs a terminal on both sides: to draw on, and to take keys from.
    on_screen = sys.stdout.isatty() and sys.stdin.isatty() and not (once or as_json or plain)
    manner = LineOptions(interval, as_json, once)
    raise typer.Exit(show_top(connection, where, manner, on_screen=on_screen))
