"""Commands that measure this machine and predict the devices that a run needs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.arguments import OVERRIDES, USAGE, split


def register(app: typer.Typer) -> None:
    """Add the commands, in the order in which help lists them."""
    for command in (profile, plan):
        app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(command)


# Predicts the devices that a run needs.

Measured = Annotated[Path | None, typer.Option(help="A profile from `streamrl profile`; default: [emulation].")]
Price = Annotated[float, typer.Option(min=0.0, help="Price of one device for an hour, in any currency.")]


def plan(
    context: typer.Context,
    devices: Annotated[int, typer.Option(min=1, help="Devices in total; with --trainer-devices: only for generation.")],
    profile: Measured = None,
    price: Price = 1.0,
    trainer_devices: Annotated[
        int | None, typer.Option(min=1, help="Devices for training, of another type at another site.")
    ] = None,
    trainer_profile: Measured = None,
    trainer_price: Price = 1.0,
    link_gbps: Annotated[float | None, typer.Option(min=1e-6, help="Gbit/s of the link between the two sites.")] = None,
    weights_gb: Annotated[float, typer.Option(min=0.0, help="Gigabytes of weights that cross it at each step.")] = 0.0,
    lengths: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A recorded run or export; the plan assumes its output lengths.")
    ] = None,
    mode: Annotated[
        Literal["any", "synchronous", "stream", "one_step_async", "trajectory_async"],
        typer.Option(help="Only this mode, or any of them."),
    ] = "any",
) -> None:
    """Predict which split of devices delivers most, at what cost.

    It also prints the settings of that split, and runs nothing.
    """
    config, overrides = split(context.args)
    from streamrl.inspection.environment import model_config
    from streamrl.planning.planner import MODES, Demand, Planner, Site, lines, recorded_lengths
    from streamrl.schemas.errors import UserError
    from streamrl.schemas.profiles import DeviceProfile
    from streamrl.settings.loading import load_settings
    from streamrl.settings.placement import with_packing

    if trainer_devices is None and devices < 2:
        raise UserError(f"expected --devices of 2 or more, one to generate and one to train, got {devices}")
    if link_gbps is not None and not weights_gb:
        raise UserError(
            "expected --weights-gb, the size of the weights that cross the link, with --link-gbps, got none"
        )
    settings = load_settings(config, overrides)
    generating, training = (DeviceProfile.read(file) if file else None for file in (profile, trainer_profile))
    measured = generating if trainer_devices is None else training
    if measured is not None and measured.cores is not None:  # it trains on a CPU, as `streamrl run` would there
        settings = with_packing(settings, model_config(settings))
    demand = Demand(
        settings=settings,
        generation=Site(devices, generating, price),
        training=None if trainer_devices is None else Site(trainer_devices, training, trainer_price),
        link_gbps=link_gbps,
        weights_gb=weights_gb,
        recorded=recorded_lengths(lengths),
    )
    choices = Planner(demand).choices(MODES if mode == "any" else (mode,), print)
    print("\n".join(lines(demand, choices)))


def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File for the profile.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, measured fewer times.")] = False,
) -> None:
    """Measure decoding, training and weight transfer here.

    It measures the configured engine and model on this machine.
    """
    config, overrides = split(context.args)
    from streamrl.inspection.environment import fitted_here
    from streamrl.planning.profiler import QUICK, THOROUGH, lines
    from streamrl.planning.profiler import profile as measure
    from streamrl.settings.loading import load_settings

    settings, _ = fitted_here(load_settings(config, overrides))
    _require_writable(out)  # before minutes of measuring
    profiled = measure(settings, QUICK if quick else THOROUGH, print)
    print("\n".join(lines(profiled)))
    profiled.profile.write(out)
    print(f"profile: {out}")


def _require_writable(out: Path) -> None:
    """Check that the file can be written.

    Raises:
        UserError: it cannot be written.
    """
    import os

    from streamrl.deploy.local.task_check import require_writable
    from streamrl.schemas.errors import UserError

    if out.is_dir() or (out.exists() and not os.access(out, os.W_OK)):
        got = "a directory" if out.is_dir() else "a file without write permission"
        raise UserError(f"expected a file for the profile, got {out}, {got}; name another with --out")
    require_writable(out.parent)
