"""Policies over several ranks. Ranks are forked from a zygote, which has imported torch and the model's code."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore, VerifiedCheckpoint
from streamrl.consumers.training.policy import PolicyPaths, TrainedPolicy
from streamrl.consumers.training.ranks.policy import RankedPolicy
from streamrl.consumers.training.ranks.sharding import leave_ranks
from streamrl.consumers.training.ranks.team import StartRank, Team
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.settings.tree import Settings
from tests.consumers.training.checkpoints.damaged_storage import manifest_of
from tests.consumers.training.ranks.zygote import Zygote

LENGTH = 9


def open_ranked(root: Path, model: Path, ranks: int, start: StartRank | None = None, **options: Any) -> RankedPolicy:
    return RankedPolicy(*_made_of(root, model, ranks, **options), start=start or Zygote.started().start)


@contextmanager
def opened(
    root: Path, model: Path, ranks: int, restored: Any = None, start: StartRank | None = None, **options: Any
) -> Iterator[TrainedPolicy]:
    """A policy over ``ranks`` ranks. With one rank, it is a policy without other processes."""
    if ranks == 1:
        yield TrainedPolicy(*_made_of(root, model, ranks, restored, **options))
        return
    policy = open_ranked(root, model, ranks, start, restored=restored, **options)
    try:
        yield policy
    finally:
        policy.close()


def _made_of(
    root: Path,
    model: Path,
    ranks: int,
    restored: VerifiedCheckpoint | None = None,
    algorithm: AlgorithmSettings | None = None,
    **training: Any,
) -> tuple[PolicyPaths, AlgorithmSettings, TrainingSettings, int, VerifiedCheckpoint | None]:
    paths = PolicyPaths(str(model), open_storage(root / "checkpoints", root / "cache"), root / "weights")
    options: dict[str, Any] = {"learning_rate": 1e-2, "threads": 1, "weight_decay": 0.01, "max_grad_norm": 1e3}
    # As in a run, the section has the settings that features add. A rank must cope with them.
    section = cast("type[TrainingSettings]", Settings.model_fields["training"].annotation)
    settings = section(ranks=ranks, **(options | training))
    return paths, algorithm or AlgorithmSettings(), settings, LENGTH, restored


def close_all() -> None:
    if Team.current is not None:
        Team.current.close()
    leave_ranks()


def step(policy: TrainedPolicy, batches: Sequence[MicroBatch], deviation: float = 1.0) -> dict[str, float]:
    for batch in batches:
        policy.accumulate(batch)
    outcome = policy.finish_step(deviation)
    assert outcome.applied, outcome.problem
    return outcome.metrics


def kept(policy: TrainedPolicy, root: Path, lineage: int = 1) -> VerifiedCheckpoint:
    """Write a checkpoint of the policy, and read it back."""
    store = CheckpointStore(open_storage(root / "checkpoints", root / "cache"), 2)
    claimed = store.claim_lineage(at_least=lineage, now=0.0)
    policy.checkpoint(manifest_of(claimed.number, policy.step), {}, b"", claimed)
    found = store.newest()
    assert found is not None
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest of the tensors' relative differences, ||a - b|| / ||a||."""
    assert one.keys() == other.keys()
    found = [
        float((one[name].double() - other[name].double()).norm() / one[name].double().norm().clamp(min=1e-30))
        for name in one
        if one[name].is_floating_point() and one[name].numel()
    ]
    return max(found)
