"""Commands that inspect running and finished runs. All except `dlq retry` only read."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from streamrl.cli.arguments import A_RUN, OVERRIDES, USAGE, GivenRun, GivenRuns, LiveRun, Servers, split
from streamrl.inspection.process import (
    DISPLAY_NICENESS,
    NICENESS,
    enter_own_session,
    log_to_stderr,
    lower_priority,
    print_before_imports,
    use_one_thread,
)
from streamrl.schemas.errors import UserError

if TYPE_CHECKING:
    from streamrl.inspection.diagnostics.connect import RunConnection
    from streamrl.settings.tree import Settings

Export = Annotated[Path | None, typer.Option(metavar="DIR", help="Read exported segments instead of a broker.")]


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    for command in (tail, status, lag, doctor, trace, ui, top, report, audit, export, replay):
        app.command()(command)
    app.command(context_settings=OVERRIDES, epilog=f"Arguments with --prompt: {USAGE}")(show)
    app.add_typer(dlq, name="dlq")


# `streamrl audit` checks that each trajectory of a run was trained once, was skipped for a reason, or is pending.


def audit(
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help=f"{A_RUN}."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Audit exported segments instead of a broker's topics.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Audit during the run until it is finished, reading only new records.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="With --follow: seconds between two lines.")] = 10.0,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="With --follow: exit with code 4 as soon as the audit fails.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_000, help="With --follow: serve metrics for Prometheus at this port, or at the next free one."
        ),
    ] = None,
) -> None:
    """Prove produced = trained + skipped(reason) + pending.

    It reads only topics and checkpoints, also during the run. Exit code 4 if the equation does not hold; the first line
    then names the first trajectory that breaks it. With --follow the audit keeps its state in the run's directory, so
    it still covers records that the topics have deleted.
    """
    if follow and (run is None or export is not None):
        raise UserError("expected a run to follow, got none; give its directory or name, and no --export")
    # With --follow not the lowest priority: next to a run that uses the whole CPU, its warnings would be minutes late.
    _give_way_to(run, DISPLAY_NICENESS if follow else NICENESS)
    if follow and run is not None:
        from streamrl.inspection.audit.following import FollowOptions, follow_run

        log_to_stderr()
        options = FollowOptions(interval, as_json=as_json, fail_fast=fail_fast, metrics_port=metrics_port)
        raise typer.Exit(follow_run(run, options))
    from streamrl.inspection.audit.command import audit_run

    # Here and below: logs go to standard error, so that the result on standard output can be piped.
    log_to_stderr()
    # Typer takes an exit code only from ``Exit`` and ignores a command's return value.
    raise typer.Exit(audit_run(run, export, as_json=as_json))


def _give_way_to(run: Path | None, niceness: int) -> None:
    """Lower this process's priority, unless it must first start the run's broker, which would inherit it.

    A broker with a low priority would start slowly on a busy machine. Call this before heavy imports, which are half of
    a short audit's work.
    """
    use_one_thread()  # before any import that loads numpy, which reads the number of threads once
    from streamrl.inspection.source import directory_of, nodes_of, own_broker

    if run is None or (directory := directory_of(run)) is None:
        return
    if own_broker(directory) is not None or not nodes_of(directory):
        lower_priority(niceness)


# `streamrl dlq` handles the records that no decoder accepted.

dlq = typer.Typer(help="Look at dead letters, and send them again.", no_args_is_help=True)


@dlq.command()
def ls(
    run: GivenRun,
    error_class: Annotated[str | None, typer.Option(help="Only this class of error, such as MalformedFrame.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only newer ones: a time span (30m, 2h, 1d), or an ISO date and time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    export: Export = None,
) -> None:
    """List dead letters: when, from where, why, how large."""
    from streamrl.inspection.dead_letters import list_dead_letters

    log_to_stderr()
    raise typer.Exit(list_dead_letters(run, export, error_class, since, json_lines=as_json))


# Not called ``show``, because that is this module's command for trajectories.
@dlq.command("show")
def dlq_show(
    offset: Annotated[int, typer.Argument(metavar="OFFSET", min=0, help="The letter's offset, as `ls` shows it.")],
    run: GivenRun,
    export: Export = None,
) -> None:
    """Print a dead letter: headers, first bytes, whether it decodes."""
    from streamrl.inspection.dead_letters import show_dead_letter

    log_to_stderr()
    raise typer.Exit(show_dead_letter(run, export, offset))


# It has no ``--export``, because it writes records and exported files cannot take any.
@dlq.command()
def retry(
    run: GivenRun,
    offsets: Annotated[
        list[int] | None, typer.Argument(metavar="OFFSET", min=0, help="The letters' offsets, as `ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Send all dead letters.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the letters that would be sent.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Send also letters that still do not decode.")] = False,
) -> None:
    """Publish dead letters again on the topics they came from.

    Letters that were sent again before are left out. Exit code 1 if some were refused.
    """
    from streamrl.inspection.dead_letters import retry_dead_letters

    log_to_stderr()
    raise typer.Exit(retry_dead_letters(run, offsets or [], everything=everything, dry_run=dry_run, force=force))


# `streamrl export` writes a run's topics to files that audit and replay read without a broker.


def export(
    run: GivenRun,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An empty directory; default: export/ in the run's directory.")
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
    """Write a run's topics to files that need no broker.

    The files hold each record's bytes and a manifest with checksums. audit, replay, show and report read them with
    --export.
    """
    from streamrl.inspection.audit.command import export_run

    log_to_stderr()
    raise typer.Exit(export_run(run, out, encoding, topics or []))


# `streamrl replay` and `streamrl show` look at past steps and trajectories and change nothing.

Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one per line with --steps.")]
Step = Annotated[int | None, typer.Option(min=1, help="Rebuild this step and show it in full.")]
Steps = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Rebuild these steps, FIRST and LAST included; one line each.")
]
Lineage = Annotated[
    int | None, typer.Option(min=1, help="Follow the steps of this lineage, also those that a crash undid.")
]
Attempt = Annotated[int | None, typer.Option(min=1, help="Number of the attempt, for a step that was refused.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="What if: another value for a setting of algorithm, training or batching; may be repeated. Each step "
        "starts from the original weights.",
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
Bisect = Annotated[
    bool, typer.Option("--bisect", help="Find the trajectories that made the step's gradient norm too large.")
]
Above = Annotated[
    float | None,
    typer.Option(
        min=0, help="Gradient norm that counts as too large; default: 10 x the median of the 20 steps before."
    ),
]
Gradients = Annotated[
    bool, typer.Option("--per-trajectory-gradients", help="Show each trajectory's own gradient norm.")
]
FromDlq = Annotated[
    bool, typer.Option("--from-dlq", help="Decode the dead letters again and show their effect, had they been trained.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write the steps' weights, gradients and updates to this directory.")
]
Threads = Annotated[int | None, typer.Option(min=0, help="CPU threads; default: as many as the trainer's.")]


def replay(
    run: GivenRun,
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
    out: Out = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Repeat past optimizer steps and compare the results.

    It works in memory, from topics and checkpoints. Without a step it lists the steps. Exit code 1 if a step on the CPU
    is not bit-equal to the original.
    """
    from streamrl.inspection.replay.command import GradientOptions, ReplayRequest, StepChoice, WhatIfOptions, step_range
    from streamrl.inspection.replay.command import replay as carry_out

    log_to_stderr()
    # Built before the run is opened, so that a wrong range of steps is refused at once.
    request = ReplayRequest(
        run=run,
        steps=StepChoice(*step_range(step, steps), lineage, attempt),
        what_if=WhatIfOptions(tuple(changes or ()), algorithm, tuple(only or ()), tuple(without or ())),
        gradients=GradientOptions(per_trajectory_gradients, bisect, above),
        from_dlq=from_dlq,
        export=export,
        out=out,
        threads=threads,
        json=json,
    )
    raise typer.Exit(carry_out(request))


def show(
    context: typer.Context,
    trajectory: Annotated[
        str | None, typer.Argument(metavar="TRAJECTORY", help="A trajectory's id or partition@offset, or a group's id.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN", help=f"{A_RUN}.")] = None,
    export: Export = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    prompt: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Print the run's prompt N (0, 1 ...) instead, also before the run."),
    ] = None,
) -> None:
    """Print a trajectory: tokens by version, rewards, history.

    For a group, it prints the samples, and whether each was trained or skipped. With --prompt it prints a prompt as the
    model sees it, token by token, and where a completion ends.
    """
    log_to_stderr()
    arguments = [*([] if trajectory is None else [trajectory]), *context.args]
    if prompt is not None:
        from streamrl.inspection.prompt_tokens import show_prompt

        show_prompt(prompt, _settings_to_show(run, arguments), as_json=json)
        return
    if trajectory is None or run is None or context.args:
        got = ", ".join(arguments) or "none"
        raise UserError(f"expected one TRAJECTORY and --run, got {got}{'' if run else ' without --run'}")
    from streamrl.inspection.replay.show import show as carry_out

    carry_out(trajectory, run, export, json=json)


def _settings_to_show(run: Path | None, arguments: list[str]) -> "Settings":
    if run is None:
        from streamrl.settings.loading import load_settings

        return load_settings(*split(arguments), to_look=True)
    if arguments:
        raise UserError(f"expected either --run or a configuration file, got --run {run} and {arguments[0]}")
    from streamrl.inspection.source import open_run

    return open_run(run).settings


# Commands that look inside a run: records, state, lag, health and traces. They only read and do not affect the run.

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def tail(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="trajectories, steps, skips, control ..., or a full name.")
    ],
    run: LiveRun = None,
    start: Annotated[
        str, typer.Option("--from", help="beginning, latest, -100, an offset, 10m, or an ISO date and time.")
    ] = "-10",
    expression: Annotated[
        str,
        typer.Option(
            "--filter", help="Such as 'worker_id~^worker and (length>500 or not reward=1)'; ~: regular expression."
        ),
    ] = "",
    partition: Annotated[list[int] | None, typer.Option(min=0, help="Only this partition; may be repeated.")] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, help="Stop after this many records.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new records as they come, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, arrays included.")] = False,
    bootstrap_servers: Servers = None,
) -> None:
    """Print the records of a topic, decoded, one line each.

    A record that does not decode is shown with the reason.
    """
    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.inspection.diagnostics.tail import TailRequest
    from streamrl.inspection.diagnostics.tail import tail as print_records

    log_to_stderr()
    request = TailRequest(topic, start, expression, partition or (), most, follow, as_json)
    raise typer.Exit(print_records(connect(run, bootstrap_servers), request))


def status(run: LiveRun = None, bootstrap_servers: Servers = None, as_json: AsJson = False) -> None:
    """Show the state of a run: step, workers, lag, skips.

    It prints version, step, workers, lag by length bucket, and trajectories in flight, trained and skipped. If the run
    has ended and no broker answers, it prints the figures that the run wrote at its end.
    """
    from streamrl.inspection.diagnostics.ended import show_ended_status, show_run
    from streamrl.inspection.diagnostics.status import show_status

    log_to_stderr()
    live, ended = partial(show_status, as_json=as_json), partial(show_ended_status, as_json=as_json)
    raise typer.Exit(show_run(run, bootstrap_servers, live, ended))


def lag(
    run: LiveRun = None,
    interval: Annotated[float, typer.Option(min=0, max=60, help="Seconds over which rates are measured.")] = 2.0,
    bootstrap_servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Show how far each consumer lags.

    It prints records, rates and seconds by partition and length bucket. If the run has ended and no broker answers, it
    prints how many trajectories were left over.
    """
    from streamrl.inspection.diagnostics.ended import show_ended_lag, show_run
    from streamrl.inspection.diagnostics.lag import show_lag

    log_to_stderr()
    live = partial(show_lag, interval_s=interval, as_json=as_json)
    raise typer.Exit(show_run(run, bootstrap_servers, live, partial(show_ended_lag, as_json=as_json)))


def doctor(run: LiveRun = None, bootstrap_servers: Servers = None, as_json: AsJson = False) -> None:
    """Check what a run needs, and say how to fix what fails.

    It checks broker, topics, sizes, codecs, clocks, disk, engine and GPU. Exit code 2 if a check fails.
    """
    from streamrl.inspection.diagnostics.doctor import run_doctor

    log_to_stderr()
    raise typer.Exit(run_doctor(run, bootstrap_servers, as_json=as_json))


def trace(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A trajectory such as chain_sum/0/0/3, a group, or a trace id.")
    ],
    # Not ``LiveRun``: traces are files in the run's directory, so no broker needs to run.
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="The run's directory or name; default: the newest that has traces."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the trace of a prompt, span by span.

    It follows the prompt from its work order to the resulting weights. The run needs telemetry.traces = "file".
    """
    from streamrl.inspection.diagnostics.trace import show_trace

    log_to_stderr()
    show_trace(name, run, as_json=as_json)


def report(
    runs: GivenRuns,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page's file; default: the run's report.html, or comparison.html here."),
    ] = None,
    reward: Annotated[
        float | None,
        typer.Option(
            metavar="LEVEL", help="Show when this reward was reached; default: the highest that all runs reached."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; write a page only with --out.")
    ] = False,
    from_topics: Annotated[
        bool, typer.Option("--from-topics", help="Read the run's topics again, from its broker or its kept Kafka data.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the run's topics again, from an export of one run.")
    ] = None,
) -> None:
    """Write a run as one page, or several side by side.

    The page is one file with curves, timelines, figures and settings.
    """
    from streamrl.inspection.report.command import report as write

    log_to_stderr()
    raise typer.Exit(write(runs, out, reward, as_json=as_json, from_topics=from_topics, export=export))


# Shows a running run in a browser, or in a terminal.

DEFAULT_PORT = 8470


def ui(
    run: LiveRun = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = DEFAULT_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen at; any address but loopback is open to the network.")
    ] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser; only print the address.")] = False,
    bootstrap_servers: Servers = None,
) -> None:
    """Show a run in the browser, and a list of all runs.

    The page has the loop, curves, a timeline, trajectories and dead letters. It shows a run that has ended from its
    files. Without --run and a running run, it lists the runs below runs/. Any number of people may watch.
    """
    print_before_imports("looking for the run")
    use_one_thread()
    from streamrl.deploy.local.run_store import run_facts
    from streamrl.inspection.dashboard.server import ServingOptions, serve
    from streamrl.inspection.dashboard.shown import find_target

    log_to_stderr()
    target = find_target(run, bootstrap_servers)
    enter_own_session()
    raise typer.Exit(serve(target, run, run_facts, ServingOptions(host, port, open_browser=not no_open)))


def top(
    run: LiveRun = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two lines.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one line and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per interval.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, also on a terminal.")] = False,
    bootstrap_servers: Servers = None,
) -> None:
    """Show a run live in the terminal.

    The view has the loop, curves, lengths, workers, trajectories and events. Any number of people may watch a run.
    Without a terminal, it prints one line per interval until the run is finished. If the run has ended and no broker
    answers, it prints one line on its end.
    """
    print_before_imports("looking for the run")
    use_one_thread()
    import sys

    from streamrl.inspection.diagnostics.ended import show_ended_top, show_run
    from streamrl.inspection.terminal.command import LineOptions, show_top

    log_to_stderr()
    # The view needs a terminal for output, to draw on, and for input, to read keys from.
    on_screen = sys.stdout.isatty() and sys.stdin.isatty() and not (once or as_json or plain)
    options = LineOptions(interval, as_json, once)

    def live(connection: "RunConnection") -> int:
        if not once:
            enter_own_session()
        return show_top(connection, run, options, on_screen=on_screen)

    raise typer.Exit(show_run(run, bootstrap_servers, live, partial(show_ended_top, as_json=as_json)))
