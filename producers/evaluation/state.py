"""The evaluator's state: the weights that are due, the running evaluation, and its samples. Pure; no bus, no clock.

Invariants:
- a_version_is_reported_once: a version that has an evaluation report is never evaluated again;
- every_sample_ends: each sample arrives, or is abandoned after ``max_attempts`` lost workers. A worker that declines an
  order does not count as lost;
- only_newest_weights_are_due: of several due versions only the newest is evaluated, since workers keep no older ones.
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
    """The prompts of all sets, with ids of the evaluation's own. ``sets``: the set of each prompt, by prompt id."""

    prompts: tuple[Prompt, ...]
    sets: Mapping[str, str]

    @classmethod
    def of(cls, named: Mapping[str, Sequence[Prompt]]) -> "HeldOutPrompts":
        """The prompts of each set, renamed by set and index, since the data's own ids may repeat."""
        found, sets = list[Prompt](), dict[str, str]()
        for name, prompts in named.items():
            for index, prompt in enumerate(prompts):
                renamed = prompt.model_copy(update={"prompt_id": f"evaluation:{name}/{index}"})
                found.append(renamed)
                sets[renamed.prompt_id] = name
        return cls(tuple(found), sets)


@dataclass
class EvaluatedGroup:
    """A held-out prompt in the running evaluation. ``missing``: indices of its missing samples.

    ``sent_at``: when it was ordered, in seconds of the evaluator's monotonic clock; ``lost``: number of workers that
    were lost with it, or did not deliver.
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
    """The evaluation of one version. ``began_at``: the time of day; ``given_up``: number of abandoned samples."""

    version: PolicyVersion
    began_at: float
    groups: dict[str, EvaluatedGroup]
    samples: dict[str, ScoredSample] = field(init=False, default_factory=dict)
    given_up: int = field(init=False, default=0)


@dataclass
class EvaluationState:
    """The due and the running evaluation, as the topics say. ``latest``: the newest lineage's last step report."""

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
        """The version that is being evaluated."""
        return None if self._under_way is None else self._under_way.version

    @property
    def groups(self) -> Mapping[str, EvaluatedGroup]:
        """The groups of the running evaluation, by group id."""
        return {} if self._under_way is None else self._under_way.groups

    def stepped(self, report: StepReport) -> None:
        """Process a step report. Weights that a newer lineage undid are no longer evaluated."""
        before = self.latest
        if before is not None and report.version < before.version:
            return
        self.latest = report
        parent = report.parent
        if parent is not None:
            self._due = None if self._due is not None and self._due.number > parent.number else self._due
            if self.target is not None and self.target.number > parent.number:
                self.drop()
        # No worker can sample with weights that were not exported.
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
        """Abandon the running evaluation."""
        self._under_way = None

    def begin(self, now: float) -> PolicyVersion | None:
        """Start the due evaluation, unless one is running. Returns its version, or None. ``now``: the time of day."""
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
        """Whether no evaluation is due or running."""
        return self._under_way is None and self._due is None

    def came(self, trajectory_id: str, sample: ScoredSample) -> bool:
        """Record a sample; whether it was awaited. A second sample with the same id is ignored."""
        group, index = self.groups.get(group_id_of(trajectory_id)), sample_index_of(trajectory_id)
        if self._under_way is None or group is None or index not in group.missing:
            return False
        group.missing.discard(index)
        self._under_way.samples[trajectory_id] = sample
        return True

    def outstanding(self, worker_id: str) -> int:
        """Number of samples that a worker has been ordered and has not delivered."""
        return sum(len(group.missing) for group in self.groups.values() if group.worker_id == worker_id)

    def unsent(self) -> list[str]:
        """Groups with missing samples that no worker has."""
        return [name for name, group in self.groups.items() if group.missing and group.worker_id is None]

    def take_back(self, name: str) -> None:
        """Free a group whose worker was lost or does not deliver. It is abandoned after ``max_attempts`` of them."""
        assert self._under_way is not None, "a group belongs to an evaluation"
        group = self.groups[name]
        group.worker_id, group.lost = None, group.lost + 1
        if group.lost >= self.max_attempts:
            self._under_way.given_up += len(group.missing)
            group.missing.clear()

    def declined(self, worker_id: str, incarnation: str, orders: Mapping[str, int]) -> list[str]:
        """Free the groups whose orders a worker's process declined; their names. ``orders``: attempt by group id."""
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
        """Extend all deadlines by ``seconds`` in which the evaluator could not read the topics."""
        for group in self.groups.values():
            group.sent_at += seconds

    def order(
        self, name: str, worker_id: str, incarnation: str, sampling: SamplingParams, now: float, time_of_day: float
    ) -> EvaluationOrder:
        """Assign a group to a worker's process. Returns the order."""
        assert self.target is not None, "an evaluation is running"
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
        """The report of the running evaluation when every sample has ended; None before."""
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

    def note_reported(self, version: PolicyVersion) -> None:
        """Note that the broker has the report of a version."""
        self.reported.add(version)
        if self._due == version:
            self._due = None
        if self.target == version:
            self.drop()
