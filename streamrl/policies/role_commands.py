"""Commands for instances, which are additional trainers on a run's stream."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.arguments import GivenRun, LiveRun, Servers

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the instance: a-z, 0-9, '_' and '-'.")]
Reason = Annotated[str, typer.Option(help="Reason for this command; shown in the logs.")]

algorithms = typer.Typer(help="List, pause and resume the trainers on a run's stream.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    app.command()(attach)
    app.command()(detach)
    app.command()(promote)
    app.command()(split)
    app.add_typer(algorithms, name="algorithms")


def attach(
    name: Name,
    run: GivenRun,
    algorithm: Annotated[
        str | None,
        typer.Option(help="A built-in name or package.module:Class; default: the instance's last one, else the run's."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Where in the stream to start if there is no checkpoint: now (default), beginning, an offset, "
            "PARTITION=OFFSET such as 0=120,1=95, an age such as 10m, or an ISO date and time.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="A setting; may be repeated.")
    ] = None,
    bootstrap_servers: Servers = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Continue, although the instance's directory was lost or moved.")
    ] = False,
) -> None:
    """Train another policy on a run's stream, next to its own.

    The command returns after the instance's last step, at the run's end or on `streamrl detach`. The run is not
    affected. Run the same command again to continue from the instance's newest checkpoint.
    """
    from streamrl.policies.role_attaching import AttachRequest
    from streamrl.policies.role_attaching import attach as attach_instance

    request = AttachRequest(name, algorithm, begin, tuple(changes or ()))
    raise typer.Exit(attach_instance(run, bootstrap_servers, request, adopt=adopt))


def detach(name: Name, run: LiveRun = None, bootstrap_servers: Servers = None, reason: Reason = "operator") -> None:
    """Stop an instance after it has written a checkpoint."""
    _send("detach", name, run, bootstrap_servers, reason)


def promote(name: Name, run: GivenRun, bootstrap_servers: Servers = None, reason: Reason = "operator") -> None:
    """Switch the workers of a running run to another policy.

    The run's own policy is named `policy`. The policy served before continues to learn from the stream.
    """
    _send("promote", name, run, bootstrap_servers, reason)


def split(
    run: GivenRun,
    shares: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=SHARE", help="Share of the groups for each instance.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Let the served policy sample everything again.")] = False,
    bootstrap_servers: Servers = None,
    reason: Reason = "operator",
) -> None:
    """Assign shares of a run's groups to instances.

    Their policies sample these shares. The served policy samples the rest. Workers are assigned in proportion; each
    follows one policy's weights.
    """
    from streamrl.policies.role_splitting import shares_in
    from streamrl.policies.role_splitting import split as assign_shares
    from streamrl.schemas.errors import UserError

    if bool(shares) == off:
        raise UserError("expected either NAME=SHARE for each instance or --off, got " + ("both" if off else "neither"))
    print(assign_shares(run, bootstrap_servers, shares_in(shares or ()), reason))


@algorithms.command()
def ls(
    run: LiveRun = None,
    bootstrap_servers: Servers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the trainers on the stream: version, reward, lag, age."""
    import asyncio
    import json

    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.policies.role_attaching import read_instances, status_lines
    from streamrl.schemas.plain_text import plain_text

    async def read() -> list[str]:
        connection = await connect(run, bootstrap_servers).with_run()
        found = await read_instances(connection)
        return [json.dumps(one.to_json()) for one in found] if as_json else status_lines(found)

    for line in asyncio.run(read()):
        print(plain_text(line))


@algorithms.command()
def pause(name: Name, run: LiveRun = None, bootstrap_servers: Servers = None, reason: Reason = "operator") -> None:
    """Pause an instance: it takes no trajectories until `resume`.

    It keeps its consumer group and its place in the stream.
    """
    _send("pause_instance", name, run, bootstrap_servers, reason)


@algorithms.command()
def resume(name: Name, run: LiveRun = None, bootstrap_servers: Servers = None, reason: Reason = "operator") -> None:
    """Resume a paused instance."""
    _send("resume_instance", name, run, bootstrap_servers, reason)


def _send(
    action: Literal["detach", "pause_instance", "resume_instance", "promote"],
    name: str,
    run: Path | None,
    servers: str | None,
    reason: str,
) -> None:
    from streamrl.policies.role_attaching import tell

    print(tell(run, servers, action, name, reason))
