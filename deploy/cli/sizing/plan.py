"""Says what a run would need."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.configuration.arguments import OVERRIDES, USAGE, split

Measured = Annotated[Path | None, typer.Option(help="What `streamrl profile` measured; else [emulation] is believed.")]
Price = Annotated[float, typer.Option(min=0.0, help="Of a device for an hour, in any currency.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(plan)


def plan(
    context: typer.Context,
    devices: Annotated[int, typer.Option(min=1, help="Devices in all; with --trainer-devices: those that generate.")],
    profile: Measured = None,
    price: Price = 1.0,
    trainer_devices: Annotated[
        int | None, typer.Option(min=1, help="Devices of another type, at another place, that train.")
    ] = None,
    trainer_profile: Measured = None,
    trainer_price: Price = 1.0,
    link_gbps: Annotated[float | None, typer.Option(min=1e-6, help="Of the link between the two places.")] = None,
    weights_gb: Annotated[float, typer.Option(min=0.0, help="Size of the weights that cross it at each step.")] = 0.0,
    lengths: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A recorded run or export whose lengths are expected again.")
    ] = None,
    mode: Annotated[
        Literal["any", "synchronous", "stream", "one_step_async", "trajectory_async"],
        typer.Option(help="Only this mode, or all that there are."),
    ] = "any",
) -> None:
    """Predict which split of devices and which settings deliver most, and what that costs; runs nothing."""
    config, overrides = split(context.args)
    from deploy.planning.derived import MODES
    from deploy.planning.planner import Demand, Planner, Site
    from deploy.planning.recorded import recorded_lengths
    from deploy.planning.showing import lines
    from deploy.settings.loading import load_settings
    from schemas.errors import UserError
    from schemas.profiles.profile import DeviceProfile

    if trainer_devices is None and devices < 2:
        raise UserError(f"expected --devices of 2 or more, one to generate and one to train, got {devices}")
    if link_gbps is not None and not weights_gb:
        raise UserError("expected --weights-gb, the size of what crosses the link, with --link-gbps, got none")
    demand = Demand(
        settings=load_settings(config, overrides),
        generation=Site(devices, DeviceProfile.read(profile) if profile else None, price),
        training=None
        if trainer_devices is None
        else Site(trainer_devices, DeviceProfile.read(trainer_profile) if trainer_profile else None, trainer_price),
        link_gbps=link_gbps,
        weights_gb=weights_gb,
        recorded=recorded_lengths(lengths),
    )
    choices = Planner(demand).choices(MODES if mode == "any" else (mode,), print)
    print("\n".join(lines(demand, choices)))
