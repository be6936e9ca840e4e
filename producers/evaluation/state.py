"""What the evaluator knows: which weights are due, what is under way for them, what has come. Pure; no bus, no clock.

Invariants:
- a_version_is_reported_once: one that has a report is never due again;
- every_sample_ends: each has come, or was given up after so many workers were lost with it; one that declines an
  order is not lost;
- only_newest_weights_are_due: workers do not keep older ones, so of several that are due the newest is evaluated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.producers.evaluation.results import ScoredSample, metrics_of
from streamrl.schemas.evaluation import EvaluationOrder, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion, group_id_of, sample_index_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.trajectories import Prompt, SamplingParams


@dataclass(frozen=True)
class HeldOutPrompts:
    """All sets: prompts whose names are the evaluation's own, and the set of each by prompt id."""

    prompts: tuple[Prompt, ...]
    sets: Mapping[str, str]

    @classmethod
    def of(cls, named: Mapping[str, Sequence[Prompt]]) -> "HeldOutPrompts":
        """Of the first prompts of each set: the set and the place in it name a prompt, whatever the data call it."""
        found, sets = list[Prompt](), dict[str, str]()
        for name, prompts in named.items():
            for index, prompt in enumerate(prompts):
                renamed = prompt.model_copy(update={"prompt_id": f"evaluation:{name}/{index}"})
                found.append(renamed)
                sets[renamed.prompt_id] = name
        return cls(tuple(found), sets)


@dataclass
class EvaluatedGroup:
    """A held-out prompt at the weights that are evaluated. ``sent_at``: in seconds of the evaluator's clock; ``lost``:
    workers that were lost with it, or did not deliver.
    """

    prompt: Prompt
    missing: set[int]
    attempt: int = -1
    lost: int = 0
    worker_id: str | None = None
    incarnation: str = ""
    sent_at: float = 0.0


@dataclass
class EvaluationState:
    """``every``: optimizer steps between evaluated weights. ``latest``: of the newest lineage, the last report."""

    held_out: HeldOutPrompts
    num_generations: int
    told_k: Sequence[int]
    every: int
    max_attempts: int
    reported: set[PolicyVersion] = field(default_factory=set)
    latest: StepReport | None = None
    target: PolicyVersion | None = None
    passed_over: int = 0
    began_at: float = 0.0
    groups: dict[str, EvaluatedGroup] = field(default_factory=dict)
    samples: dict[str, ScoredSample] = field(default_factory=dict)
    given_up: int = 0
    _due: PolicyVersion | None = None

    def stepped(self, report: StepReport) -> None:
        """A step was reported. Weights that a newer lineage undid are not evaluated any more."""
        before = self.latest
        if before is not None and report.version < before.version:
            return
        self.latest = report
        parent = report.parent
        if parent is not None:
            self._due = None if self._due is not None and self._due.number > parent.number else self._due
            if self.target is not None and self.target.number > parent.number:
                self.drop()
        # What was not exported nobody can sample with.
        if report.manifest_sha256 is None or report.step % self.every:
            return
        # A resumed trainer reports its checkpoint's weights again, under its own lineage.
        if parent is not None and (parent in self.reported or parent == self.target):
            return
        if report.version not in self.reported and report.version != self.target:
            self.passed_over += self._due is not None
            self._due = report.version

    def reaches_beyond(self, version: PolicyVersion) -> bool:
        """Whether weights above this version are due or under way."""
        return any(wanted is not None and wanted > version for wanted in (self._due, self.target))

    def drop(self) -> None:
        """Give the evaluation that is under way up, as a whole: its weights are no part of the run any more."""
        self.target = None
        self.groups, self.samples, self.given_up = {}, {}, 0

    def begin(self, now: float) -> PolicyVersion | None:
        """Begin with the weights that are due, unless some are under way; which, or none. ``now``: the time of day."""
        if self.target is not None or self._due is None:
            return None
        self.target, self._due = self._due, None
        self.began_at, self.given_up = now, 0
        wanted = set(range(self.num_generations))
        self.samples = {}
        self.groups = {
            f"{prompt.prompt_id}/{self.target}": EvaluatedGroup(prompt, set(wanted)) for prompt in self.held_out.prompts
        }
        return self.target

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due or under way."""
        return self.target is None and self._due is None

    def came(self, trajectory_id: str, sample: ScoredSample) -> bool:
        """A sample was delivered; whether it was awaited. A second one of the same name counts for nothing."""
        group, index = self.groups.get(group_id_of(trajectory_id)), sample_index_of(trajectory_id)
        if group is None or index not in group.missing:
            return False
        group.missing.discard(index)
        self.samples[trajectory_id] = sample
        return True

    def outstanding(self, worker_id: str) -> int:
        """Samples that a worker owes."""
        return sum(len(group.missing) for group in self.groups.values() if group.worker_id == worker_id)

    def unsent(self) -> list[str]:
        """Groups with samples missing that no worker has."""
        return [name for name, group in self.groups.items() if group.missing and group.worker_id is None]

    def take_back(self, name: str) -> None:
        """A group's worker was lost, or does not deliver: it is for another, or given up after so many."""
        group = self.groups[name]
        group.worker_id, group.lost = None, group.lost + 1
        if group.lost >= self.max_attempts:
            self.given_up += len(group.missing)
            group.missing.clear()

    def declined(self, worker_id: str, incarnation: str, orders: Mapping[str, int]) -> list[str]:
        """A worker's process does not carry these out, by group, which attempt: those that it had are for another."""
        found = [
            name
            for name, attempt in orders.items()
            if (group := self.groups.get(name)) is not None
            and group.missing
            and (group.worker_id, group.incarnation, group.attempt) == (worker_id, incarnation, attempt)
        ]
        for name in found:
            self.groups[name].worker_id = None
        return found

    def extend(self, seconds: float) -> None:
        """For so long nobody was listened to: no order is late because of it."""
        for group in self.groups.values():
            group.sent_at += seconds

    def order(
        self, name: str, worker_id: str, incarnation: str, sampling: SamplingParams, now: float, time_of_day: float
    ) -> EvaluationOrder:
        """The order with which a group goes to a worker's process."""
        assert self.target is not None, "an evaluation is under way"
        group = self.groups[name]
        group.worker_id, group.incarnation, group.sent_at, group.attempt = (
            worker_id,
            incarnation,
            now,
            group.attempt + 1,
        )
        return EvaluationOrder(
            group_id=name,
            worker_id=worker_id,
            incarnation=incarnation,
            prompt=group.prompt,
            sampling=sampling,
            num_generations=self.num_generations,
            sample_indices=tuple(sorted(group.missing)),
            attempt=group.attempt,
            version=self.target,
            created_at=time_of_day,
        )

    def report(self, time_of_day: float) -> EvaluationReport | None:
        """What the weights came to, once every sample has ended; none before."""
        if self.target is None or any(group.missing for group in self.groups.values()):
            return None
        made = self.samples.values()
        return EvaluationReport(
            version=self.target,
            step=self.target.number,
            metrics=metrics_of(made, self.held_out.sets, self.num_generations, self.told_k),
            prompts=len(self.held_out.prompts),
            samples=len(self.samples),
            missing=self.given_up,
            oldest=min((sample.oldest for sample in made), default=self.target),
            newest=max((sample.newest for sample in made), default=self.target),
            began_at=self.began_at,
            sent_at=time_of_day,
        )

    def was_reported(self, version: PolicyVersion) -> None:
        """The broker has the report of a version."""
        self.reported.add(version)
        if self._due == version:
            self._due = None
        if self.target == version:
            self.drop()
