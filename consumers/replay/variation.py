"""What a what-if changes: settings, and which trajectories take part. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from consumers.algorithms.credit import ModelLimits
from consumers.batching.samples import Group
from consumers.batching.settings import BatchingSettings
from consumers.replay.rebuilding.scratch_policy import Recipe
from consumers.replay.steps.batches import Batch, Cut, as_cut_anew, as_recorded
from schemas.errors import UserError
from schemas.messages.reports import RecordRef


def ids_among(
    refs: Iterable[RecordRef], given: Iterable[str], *, run: str = "RUN", step: int | None = None
) -> set[str]:
    """Ids of trajectories that are named by id or ``partition@offset``. ``run``, ``step``: for the error, where known.

    Raises:
        UserError: one of them is not among the records.
    """
    ids = {f"{ref.partition}@{ref.offset}": ref.trajectory_id for ref in refs}
    known, found = set(ids.values()), [ids.get(name, name) for name in given]
    if unknown := [name for name in found if name not in known]:
        of, number = ("the step", "N") if step is None else (f"step {step}", step)
        raise UserError(
            f"expected a trajectory that {of} trained, got {unknown[0]!r}; "
            f"`streamrl replay {run} --step {number}` lists them"
        )
    return set(found)


@dataclass(frozen=True)
class Variation:
    """``changes`` says it in words. ``batching`` None: micro-batches stay as recorded, where they can.

    ``only`` (empty: all) and ``without`` name trajectories by id or ``partition@offset``; they keep the advantages
    that the whole groups give them.
    """

    recipe: Recipe
    changes: tuple[str, ...] = ()
    batching: BatchingSettings | None = None
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def batch(self, groups: Iterable[Group], cut: Cut, recut: BatchingSettings, limits: ModelLimits) -> Batch:
        """The step's batch under this variation. ``recut``: the run's own batching, should the cut no longer fit.

        Raises:
            UserError: a named trajectory is not in the step, or nothing is left.
        """
        members = tuple(groups)
        batch = as_cut_anew(members, self.recipe.algorithm, self.batching or recut, limits)
        if self.batching is None and set(batch.samples) == {ref.trajectory_id for rows in cut for ref in rows}:
            batch = as_recorded(members, cut, self.recipe.algorithm, limits)
        return self._selected(batch)

    def _selected(self, batch: Batch) -> Batch:
        if not self.only and not self.without:
            return batch
        refs = [ref for part in batch.micro_batches for ref in part.refs]
        only, without = (ids_among(refs, sorted(given)) for given in (self.only, self.without))
        left = (only or {ref.trajectory_id for ref in refs}) - without
        if not left:
            raise UserError("expected --only and --without to leave a trajectory in the step, got none")
        return batch.keeping(left)
