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
from streamrl.producers.evaluation.settings import HeldOutSettings
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
class EvaluationUnderWay:
    """The evaluation of one version. ``began_at``: the time of day; ``given_up``: samples that nobody makes."""

    version: PolicyVersion
    began_at: float
    groups: dict[str, EvaluatedGroup]
    samples: dict[str, ScoredSample] = field(init=False, default_factory=dict)
    given_up: int = field(init=False, default=0)


@dataclass
class EvaluationState:
    """What is due and under way by the topics. ``latest``: of the newest lineage, the last report."""

    held_out: HeldOutPrompts
    settings: HeldOutSettings
    max_attempts: int
    reported: set[PolicyVersion] = field(init=False, default_factory=set)
    latest: StepReport | None = field(init=False, default=None)
    passed_over: int = field(init=False, default=0)
    _due: PolicyVersion | None = field(init=False, default=None)
    _under_way: EvaluationUnderWay | None = field(init=False, default=None)

    @property
    def target(self) -> PolicyVersion | None:
        """The version whose evaluation is under way."""
        return None if self._under_way is None else self._under_way.version

    @property
    def groups(self) -> Mapping[str, EvaluatedGroup]:
        """The prompts of the evaluation that is under way."""
        return {} if self._under_way is None else self._under_way.groups

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
        if report.manifest_sha256 is None or report.step % self.settings.every:
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
        self._under_way = None

    def begin(self, now: float) -> PolicyVersion | None:
        """Begin with the weights that are due, unless some are under way; which, or none. ``now``: the time of day."""
        if self._under_way is not None or self._due is None:
            return None
        version, self._due = self._due, None
        wanted = range(self.settings.samples)
        groups = {
            f"{prompt.prompt_id}/{version}": EvaluatedGroup(prompt, set(wanted)) for prompt in self.held_out.prompts
        }
        self._under_way = EvaluationUnderWay(version, now, groups)
        return version

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due or under way."""
        return self._under_way is None and self._due is None

    def came(self, trajectory_id: str, sample: ScoredSample) -> bool:
        """A sample was delivered; whether it was awaited. A second one of the same name counts for nothing."""
        group, index = self.groups.get(group_id_of(trajectory_id)), sample_index_of(trajectory_id)
        if self._under_way is None or group is None or index not in group.missing:
            return False
        group.missing.discard(index)
        self._under_way.samples[trajectory_id] = sample
        return True

    def outstanding(self, worker_id: str) -> int:
        """Samples that a worker owes."""
        return sum(len(group.missing) for group in self.groups.values() if group.worker_id == worker_id)

    def unsent(self) -> list[str]:
        """Groups with samples missing that no worker has."""
        return [name for name, group in self.groups.items() if group.missing and group.worker_id is None]

    def take_back(self, name: str) -> None:
        """A group's worker was lost, or does not deliver: it is for another, or given up after so many."""
        assert self._under_way is not None, "a group is of an evaluation"
        group = self.groups[name]
        group.worker_id, group.lost = None, group.lost + 1
        if group.lost >= self.max_attempts:
            self._under_way.given_up += len(group.missing)
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
            num_generations=self.settings.samples,
            sample_indices=tuple(sorted(group.missing)),
            attempt=group.attempt,
            version=self.target,
            created_at=time_of_day,
        )

    def report(self, time_of_day: float) -> EvaluationReport | None:
        """What the weights came to, once every sample has ended; none before."""
        ended = self._under_way
        if ended is None or any(group.missing for group in ended.groups.values()):
            return None
        made = ended.samples.values()
        return EvaluationReport(
            version=ended.version,
            step=ended.version.number,
            metrics=metrics_of(made, self.held_out.sets, self.settings.samples, self.settings.told_k),
            prompts=len(self.held_out.prompts),
            samples=len(made),
            missing=ended.given_up,
            oldest=min((sample.oldest for sample in made), default=ended.version),
            newest=max((sample.newest for sample in made), default=ended.version),
            began_at=ended.began_at,
            sent_at=time_of_day,
        )

    def was_reported(self, version: PolicyVersion) -> None:
        """The broker has the report of a version."""
        self.reported.add(version)
        if self._due == version:
            self._due = None
        if self.target == version:
            self.drop()
