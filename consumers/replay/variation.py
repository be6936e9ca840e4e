"""What a what-if changes: settings, and which trajectories take part. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from consumers.algorithms.credit import ModelLimits
from consumers.batching.samples import Group
from consumers.batching.settings import BatchingSettings
from consumers.replay.rebuilding.scratch_policy import Recipe
from consumers.replay.steps.batches import Batch, Cut, as_cut_anew, as_recorded
from schemas.errors import UserError


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
        names = {
            f"{ref.partition}@{ref.offset}": ref.trajectory_id for part in batch.micro_batches for ref in part.refs
        }
        known = set(names.values())

        def ids(given: frozenset[str]) -> set[str]:
            found = {names.get(name, name) for name in given}
            if unknown := sorted(found - known):
                raise UserError(
                    f"expected a trajectory that the step trained, got {unknown[0]!r}; "
                    "`streamrl replay RUN --step N` lists them"
                )
            return found

        left = (ids(self.only) or known) - ids(self.without)
        if not left:
            raise UserError("expected --only and --without to leave a trajectory in the step, got none")
        return batch.keeping(left)
