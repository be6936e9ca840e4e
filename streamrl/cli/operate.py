"""Commands for operators: runs, checkpoints, the embedded broker, topics, and pause, resume and drain."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.arguments import GivenRun, LiveRun, Servers


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    for command in (pause, resume, drain):
        app.command()(command)
    app.add_typer(runs, name="runs")
    app.add_typer(checkpoints, name="checkpoints")
    app.add_typer(kafka, name="kafka")
    app.add_typer(topics, name="topics")


# Directories of runs on this disk.

runs = typer.Typer(help="List runs on this disk, and remove them.", no_args_is_help=True)
RunsDirectory = Annotated[Path, typer.Option("--directory", help="The directory that holds the runs' directories.")]


@runs.command()
def ls(
    directory: RunsDirectory = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List runs: state, last step, reward, size, time. Oldest first."""
    from streamrl.deploy.local.run_store import list_runs

    raise typer.Exit(list_runs(directory, as_json=as_json))


# Not called ``rm``, because that is this module's command for topics.
@runs.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names as `ls` shows them.")],
    directory: RunsDirectory = Path("runs"),
    keep_results: Annotated[
        bool, typer.Option("--keep-results", help="Remove broker data, weights and logs; keep report and checkpoints.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs for good. Refused if one is running."""
    from streamrl.deploy.local.run_store import remove_runs

    raise typer.Exit(remove_runs(directory, names, keep_results=keep_results, ask=not yes))


# A run's checkpoints.

checkpoints = typer.Typer(help="List, verify, pin and restore a run's checkpoints.", no_args_is_help=True)

Which = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Its step, its version such as 1-40, or its pin's name.")
]


@checkpoints.command("ls")
def list_(
    run: GivenRun,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file's checksum, which takes time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List checkpoints: step, version, parent, size, time, pins, state.

    Newest first. An arrow marks the checkpoint that the next start continues from. Exit code 4 if one does not verify.
    """
    from streamrl.deploy.local.savepoints import list_checkpoints
    from streamrl.inspection.process import log_to_stderr

    log_to_stderr()
    raise typer.Exit(list_checkpoints(run, verify=verify, as_json=as_json))


@checkpoints.command()
def verify(
    run: GivenRun,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="Step, version or pin's name; default: all.")
    ] = None,
) -> None:
    """Compare every file with its checksum in the manifest.

    The manifest ends with a checksum of its own. The command names each damaged file; exit code 4 if there is one.
    """
    from streamrl.deploy.local.savepoints import verify_checkpoints
    from streamrl.inspection.process import log_to_stderr

    log_to_stderr()
    raise typer.Exit(verify_checkpoints(run, checkpoint))


@checkpoints.command()
def pin(
    checkpoint: Which,
    run: GivenRun,
    name: Annotated[str | None, typer.Option(help="Name of the pin; default: the checkpoint's version.")] = None,
) -> None:
    """Keep a checkpoint until it is unpinned; the run may be running."""
    from streamrl.deploy.local.savepoints import pin_checkpoint

    raise typer.Exit(pin_checkpoint(run, checkpoint, name))


@checkpoints.command()
def unpin(checkpoint: Which, run: GivenRun) -> None:
    """Remove a pin by its name, or all pins of a checkpoint."""
    from streamrl.deploy.local.savepoints import unpin_checkpoint

    raise typer.Exit(unpin_checkpoint(run, checkpoint))


@checkpoints.command()
def merge(
    run: GivenRun,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the model.")],
) -> None:
    """Write the newest adapter and its base as one model.

    Only for runs with training.lora. Load the model with from_pretrained, or in engines that do not support adapters.
    """
    from streamrl.deploy.local.savepoints import merge_newest

    raise typer.Exit(merge_newest(run, out))


@checkpoints.command()
def restore(checkpoint: Which, run: GivenRun) -> None:
    """Let the next start continue from a checkpoint; undo later steps.

    The run must be stopped. Later checkpoints are renamed and kept. Their trajectories are trained again if the topic
    still holds them.
    """
    from streamrl.deploy.local.savepoints import restore_checkpoint

    raise typer.Exit(restore_checkpoint(run, checkpoint))


# The embedded broker and the topics of a run.

kafka = typer.Typer(help="A Kafka broker on this machine; Java need not be installed.", no_args_is_help=True)
topics = typer.Typer(help="Make a broker match the topic catalogue.", no_args_is_help=True)

DataDir = Annotated[Path | None, typer.Option(help="Directory for the broker's data; default: in the cache.")]
TopicsRun = Annotated[
    Path,
    typer.Option(
        "--run", metavar="RUN", help="The run's directory, its configuration file, or its name: its topics' prefix."
    ),
]
PARTITIONS = 8
Partitions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Partitions of the trajectories topic: 2 × length buckets; default: from the run's settings here, else 8.",
    ),
]


@kafka.command()
def up(
    nodes: Annotated[int, typer.Option(help="Number of nodes: 1, or 3 for a replicated cluster.")] = 1,
    port: Annotated[int | None, typer.Option(help="Port of the first node; default: a free one.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Start a broker in the background and print its address."""
    from streamrl.bus.embedded import detached
    from streamrl.schemas.errors import UserError

    if nodes not in (1, 3):  # a cluster of two stops as soon as one node is lost
        raise UserError(f"expected --nodes of 1, or of 3 for a replicated cluster, got {nodes}")
    status = detached.up(nodes=nodes, data_dir=data_dir or detached.default_data_dir(), port=port, progress=print)
    where = f" --data-dir {data_dir}" if data_dir else ""
    print(f"Kafka is up: {status.bootstrap_servers}; it runs until `streamrl kafka down{where}`")


@kafka.command()
def down(data_dir: DataDir = None) -> None:
    """Stop the broker started by `up`; its data is kept."""
    from streamrl.bus.embedded import detached

    print("Kafka is down" if detached.down(data_dir or detached.default_data_dir()) else "Kafka was not running")


@kafka.command()
def show(data_dir: DataDir = None) -> None:
    """Say whether the broker started by `up` is running, and where.

    Exit code 1 if it is not.
    """
    from streamrl.bus.embedded import detached

    found = detached.status(data_dir or detached.default_data_dir())
    print(f"Kafka {found.version} {'is running' if found.running else 'is not running'}; data in {found.data_dir}")
    for node in found.nodes:
        print(f"  127.0.0.1:{node.port}  pid {node.pid}  {'alive' if node.alive else 'dead'}")
    raise typer.Exit(0 if found.running else 1)


@topics.command()
def apply(run: TopicsRun, bootstrap_servers: Servers = None, partitions: Partitions = None) -> None:
    """Create or alter the run's topics so that they match the catalogue.

    Running it again changes nothing.
    """
    _topics(run, bootstrap_servers, partitions, change=True)


@topics.command()
def diff(run: TopicsRun, bootstrap_servers: Servers = None, partitions: Partitions = None) -> None:
    """Print the changes that `apply` would make. Exit code 1 if there are any."""
    if _topics(run, bootstrap_servers, partitions, change=False):
        raise typer.Exit(1)


@topics.command()
def rm(
    run: TopicsRun,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers",
            "--kafka.bootstrap_servers",
            envvar="STREAMRL_KAFKA__BOOTSTRAP_SERVERS",
            help="The broker; default: the run's own, started for this command, or the one of `streamrl kafka up`.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove the topics of a run and all their records, for good.

    The run's directory is not changed. Refused while the trainer or a worker of the run is alive.
    """
    import sys

    from streamrl.bus.kafka.bus import KafkaBus
    from streamrl.bus.kafka.topic_admin import delete_topics, topics_of
    from streamrl.deploy.wiring.broker import broker_with, living_process
    from streamrl.schemas.errors import UserError
    from streamrl.schemas.topics import HEARTBEATS

    with broker_with(run, bootstrap_servers, print) as (kafka, name):
        full_names = asyncio.run(topics_of(kafka, name))
        if not full_names:
            print(f"no topics of run {name} at {kafka.bootstrap_servers}: nothing to remove")
            return
        if HEARTBEATS.full_name(name) in full_names and (living := asyncio.run(living_process(KafkaBus(kafka), name))):
            raise UserError(
                f"expected run {name} to be stopped, got a heartbeat of its {living} at {kafka.bootstrap_servers}; "
                "stop the run first, with Ctrl-C or `streamrl drain`"
            )
        if not yes and not sys.stdin.isatty():
            raise UserError(
                f"expected a confirmation that {len(full_names)} topics of run {name} may be removed, got no terminal "
                "to ask on; give --yes"
            )
        if not yes and not typer.confirm(f"remove {', '.join(full_names)} at {kafka.bootstrap_servers} for good?"):
            print("nothing was removed")
            raise typer.Exit(1)
        for full_name in asyncio.run(delete_topics(kafka, name)):
            print(f"removed: {full_name}")


def _topics(run: Path, servers: str | None, partitions: int | None, *, change: bool) -> bool:
    from streamrl.bus.kafka.topic_admin import apply_topics, diff_topics
    from streamrl.inspection.diagnostics.connect import connect
    from streamrl.schemas.errors import UserError
    from streamrl.schemas.plain_text import plain_text

    connection = connect(run, servers)
    if not (name := connection.run):
        raise UserError(f"expected a run with a name, got {run} without run.name; set it, or name the run with --run")
    if partitions is None:
        own = connection.settings if connection.settings is not None and connection.settings.run.name == name else None
        partitions = PARTITIONS if own is None else own.loop.trajectory_partitions
    make = apply_topics if change else diff_topics
    changes = asyncio.run(make(connection.address, name, partitions, None, connection.kafka))
    for item in changes:
        print(plain_text(str(item)))
    if not changes:
        print(f"the topics of run {name} at {connection.address} match the catalogue")
    return bool(changes)


Reason = Annotated[str, typer.Option(help="Why; shown in the logs.")]


def pause(run: LiveRun = None, bootstrap_servers: Servers = None, reason: Reason = "operator") -> None:
    """Pause a run: running completions finish, no new ones start."""
    _send("pause", run, bootstrap_servers, reason)


def resume(run: LiveRun = None, bootstrap_servers: Servers = None, reason: Reason = "operator") -> None:
    """Resume a paused run."""
    _send("resume", run, bootstrap_servers, reason)


def drain(
    run: LiveRun = None,
    worker: Annotated[str, typer.Option(help="Only this worker; default: all.")] = "",
    bootstrap_servers: Servers = None,
    reason: Reason = "operator",
) -> None:
    """Let workers finish their completions and exit."""
    _send("drain_worker" if worker else "drain", run, bootstrap_servers, reason, worker or None)


def _send(
    action: Literal["pause", "drain", "resume", "drain_worker"],
    run: Path | None,
    servers: str | None,
    reason: str,
    worker: str | None = None,
) -> None:
    from streamrl.deploy.wiring.broker import send_command
    from streamrl.inspection.diagnostics.connect import connect

    connection = asyncio.run(connect(run, servers).with_run())
    send_command(connection.kafka, connection.run, action, reason, worker_id=worker)
    print(f"asked run {connection.run} at {connection.address}: {action}{f' {worker}' if worker else ''}")
