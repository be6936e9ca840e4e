"""The ways to train the same trajectories that are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """``overrides``: what differs from the run that the trajectories come from."""

    name: str
    means: str
    overrides: tuple[str, ...]


NEVER = 1_000_000

VARIANTS = (
    Variant(
        "off",
        "plain announcements, no digests, no checkpoint but the last",
        ("--training.announce=plain", "--training.tensor_digests=false", f"--training.checkpoint_every={NEVER}"),
    ),
    Variant(
        "protocol",
        "announcements in transactions, digests of every tensor",
        ("--training.announce=transaction", "--training.tensor_digests=true", f"--training.checkpoint_every={NEVER}"),
    ),
    Variant(
        "protocol and checkpoints",
        "the same, and a checkpoint every 40 steps, as in the demo",
        ("--training.announce=transaction", "--training.tensor_digests=true", "--training.checkpoint_every=40"),
    ),
)
