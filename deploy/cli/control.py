"""What an operator asks of a running run; the coordinator carries it out."""

from typing import Annotated, Literal

import typer

Run = Annotated[str, typer.Option("--run", help="Name of the run.")]
Servers = Annotated[
    str,
    typer.Option("--bootstrap-servers", envvar="STREAMRL_KAFKA__BOOTSTRAP_SERVERS", help="The run's Kafka broker."),
]
Reason = Annotated[str, typer.Option(help="Why; shown in the logs.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (pause, resume, drain):
        app.command()(command)


def pause(run: Run, bootstrap_servers: Servers, reason: Reason = "operator") -> None:
    """Start no new completions; running ones finish."""
    _send("pause", run, bootstrap_servers, reason)


def resume(run: Run, bootstrap_servers: Servers, reason: Reason = "operator") -> None:
    """Go on after a pause."""
    _send("resume", run, bootstrap_servers, reason)


def drain(
    run: Run,
    bootstrap_servers: Servers,
    worker: Annotated[str, typer.Option(help="Only this worker; all if left out.")] = "",
    reason: Reason = "operator",
) -> None:
    """Let workers finish what they hold and leave."""
    _send("drain_worker" if worker else "drain", run, bootstrap_servers, reason, worker or None)


def _send(
    action: Literal["pause", "drain", "resume", "drain_worker"],
    run: str,
    servers: str,
    reason: str,
    worker: str | None = None,
) -> None:
    from deploy.wiring.commands import send_command

    send_command(servers, run, action, reason, worker)
    print(f"asked run {run}: {action}{f' {worker}' if worker else ''}")
