"""`streamrl replay` and `streamrl show`: looks at past steps and trajectories again, and touches nothing."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory, or its name under runs/.")]
Export = Annotated[Path | None, typer.Option(help="Read exported segments instead of a broker.", metavar="DIR")]
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
Algorithm = Annotated[str | None, typer.Option(help="What if: another algorithm (grpo, rloo).")]
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


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(replay)
    app.command()(show)


def replay(
    run: Run,
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
    """Rebuild past optimizer steps from what is recorded, and compare; without a step: list what there is.

    Exit code 1 if a step does not come out bit-equal on the CPU.
    """
    from deploy.inspection.replays.replaying import log_to_stderr
    from deploy.inspection.replays.replaying import replay as carry_out
    from deploy.inspection.replays.request import Request, step_range

    log_to_stderr()
    first, last = step_range(step, steps)
    request = Request(
        run=run,
        first=first,
        last=last,
        lineage=lineage,
        attempt=attempt,
        changes=tuple(changes or ()),
        algorithm=algorithm,
        only=tuple(only or ()),
        without=tuple(without or ()),
        bisect=bisect,
        above=above,
        row_gradients=per_trajectory_gradients,
        from_dlq=from_dlq,
        export=export,
        keep=keep,
        threads=threads,
        json=json,
    )
    raise typer.Exit(carry_out(request))


def show(
    trajectory: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="Its id, or partition@offset.")],
    run: Run,
    export: Export = None,
    json: Json = False,
) -> None:
    """Print a trajectory: prompt, tokens by weight version, rewards, and its whole life with times."""
    from deploy.inspection.replays.showing import show as carry_out

    carry_out(trajectory, run, export, json=json)
