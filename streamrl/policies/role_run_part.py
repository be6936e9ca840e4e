"""The instances beside a run's own trainer, as displays tell of them: what each was told, its newest step, whether one
that is served is still there, and what the arms of a split have sampled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.observability.run_state.aggregates import LAG_PREFIX, EventLog
from streamrl.observability.run_state.parts import RunPart, Section
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.policies.splitting import ArmRewards
from streamrl.schemas.control import InstanceState, PolicySplit, Served
from streamrl.schemas.identifiers import SERVED_ARM, SERVED_POLICY, named_version, policy_in, scope_of
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import StepReport, TrainerBeat
from streamrl.schemas.topics import HEARTBEATS, STEPS

MOST = 64
"""Instances that are held: names come from operators."""
SILENT_AFTER_S = 10.0
"""Ten beats: it may be away for a moment when it begins a new lineage."""


@dataclass
class Instances(RunPart):
    """By name. ``served``: the policy whose weights the workers follow; ``heard_at``: its last sign of life, or when it
    was promoted, in epoch seconds. ``rewards``: of what each arm of the split has sampled since it was ordered.
    """

    run: str
    served: str = SERVED_POLICY
    heard_at: dict[str, float] = field(default_factory=dict)
    told: dict[str, InstanceState] = field(default_factory=dict)
    newest: dict[str, StepReport] = field(default_factory=dict)
    split: PolicySplit | None = None
    rewards: ArmRewards = field(default_factory=ArmRewards)

    def observe(self, message: Message, log: EventLog) -> None:
        """See ``RunPart``."""
        match message:
            case InstanceState() if self._tell(message):
                told = {"run": "works", "pause": "is paused", "detached": "was detached"}[message.mode]
                log.add(message.sent_at, "info", f"instance {message.policy} {told}")
            case Served() if self._serve(message):
                log.add(message.sent_at, "info", f"{message.policy} is served from now on")
            case PolicySplit() if self._divide(message):
                shares = ", ".join(f"{arm.policy} {arm.share:.3g}" for arm in message.arms)
                told = f"groups are split: {shares}" if shares else "the served policy samples everything again"
                log.add(message.sent_at, "info", told)
            case TrainerBeat():
                self._heard(message.policy, message.sent_at)
            case StepReport() if message.policy != policy_in(self.run):
                self._step(message)

    def sampled(self, summary: TrajectorySummary) -> None:
        """See ``RunPart``."""
        if self.split is not None and self.split.arms:
            self.rewards.add(summary.policy, summary.reward)

    @property
    def topics(self) -> frozenset[str]:
        """Steps and beats of the instances that are known."""
        scopes = [scope_of(self.run, name) for name in self.told]
        return frozenset(topic.full_name(scope) for scope in scopes for topic in (STEPS, HEARTBEATS))

    @property
    def own_trainer_leads(self) -> bool:
        """Unless another policy is served: how many steps an instance takes is its own affair."""
        return self.served == SERVED_POLICY

    def warning(self, now: float) -> str | None:
        """What to do about the trainer of the served policy, which nobody starts again."""
        if (name := self._missing(now)) is None:
            return None
        return (
            f"{name} is served and silent, workers wait for its weights: `streamrl attach {name} --run {self.run}` "
            f"goes on with it, `streamrl promote {SERVED_POLICY} --run {self.run}` without"
        )

    @property
    def warning_topics(self) -> frozenset[str]:
        """The beats of the instance that is served."""
        if self.served == SERVED_POLICY:
            return frozenset()
        return frozenset({HEARTBEATS.full_name(scope_of(self.run, self.served))})

    @property
    def sections(self) -> Mapping[str, Section]:
        """``instances``, and the ``arms`` of a split."""
        return {"instances": self.rows, "arms": lambda _now: self._arms()}

    def status_lines(self) -> Iterator[str]:
        """One each."""
        for name, told in sorted(self.told.items()):
            mode = f"{told.mode}, served" if name == self.served else told.mode
            yield f"instance  {name} ({told.algorithm}): {mode}; `streamrl algorithms status` tells more"

    def rows(self, now: float) -> list[dict[str, Any]]:
        """One each: ``age`` in served versions, ``lag`` in records that it has not finished, ``quiet_s`` since its
        newest step; None: it has taken none. ``silent``: workers wait for it, and it is not heard.
        """
        return [self._row(name, now) for name in sorted(self.told)]

    def _row(self, name: str, now: float) -> dict[str, Any]:
        told, report = self.told[name], self.newest.get(name)
        return {
            "name": name,
            "algorithm": told.algorithm,
            "mode": told.mode,
            "served": name == self.served,
            "silent": name == self._missing(now),
            **standing(report),
            "quiet_s": None if report is None else round(max(0.0, now - report.sent_at)),
        }

    def _arms(self) -> list[dict[str, Any]]:
        """One each, the served policy's last; none without a split. ``workers`` None: all that no other arm has."""
        if self.split is None or not self.split.arms:
            return []
        shares = self.split.shares
        shares = {**shares, "": max(0.0, 1.0 - sum(shares.values()))}
        found = []
        for arm, share in shares.items():
            count, mean = self.rewards.of(arm)
            workers = sum(dealt == arm for dealt in self.split.workers.values()) if arm else None
            about = {"name": arm or SERVED_ARM, "share": round(share, 6), "workers": workers}
            found.append({**about, "sampled": count, "reward": None if mean is None else round(mean, 4)})
        return found

    def _divide(self, message: PolicySplit) -> bool:
        """Who samples what share of the groups; whether that is news."""
        before = {} if self.split is None else self.split.shares
        self.split, is_news = message, message.shares != before
        if is_news:
            self.rewards = ArmRewards()
        return is_news

    def _tell(self, message: InstanceState) -> bool:
        """What one was told; whether that is news."""
        before = self.told.get(message.policy)
        if before is None and len(self.told) >= MOST:
            return False
        self.told[message.policy] = message
        return before is None or before.mode != message.mode

    def _serve(self, message: Served) -> bool:
        """Which policy is served; whether that is news."""
        is_news, self.served = message.policy != self.served, message.policy
        self._heard(message.policy, message.sent_at)
        return is_news

    def _heard(self, policy: str | None, at: float) -> None:
        if policy is not None and (policy in self.told or policy == self.served):
            self.heard_at[policy] = max(at, self.heard_at.get(policy, at))

    def _missing(self, now: float) -> str | None:
        """The instance whose weights the workers wait for and which is not heard, if that is so."""
        is_silent = now - self.heard_at.get(self.served, now) > SILENT_AFTER_S
        return self.served if is_silent and self.served != SERVED_POLICY else None

    def _step(self, report: StepReport) -> None:
        """A step of one that is known; one of an older lineage that comes late is none."""
        if report.policy not in self.told:
            return
        self._heard(report.policy, report.sent_at)
        known = self.newest.get(report.policy)
        if known is None or report.version >= known.version:
            self.newest[report.policy] = report


def standing(report: StepReport | None) -> dict[str, Any]:
    """What every display tells of a trainer's newest step: its ``version`` and ``step``, the ``reward``, the mean
    ``age`` of what it trained, and the ``lag``, in trajectories that it has not finished. None: it has taken none, or
    does not say.
    """
    metrics = {} if report is None else report.metrics
    lags = [value for key, value in metrics.items() if key.startswith(LAG_PREFIX)]
    return {
        "version": None if report is None else named_version(report.policy, report.version),
        "step": None if report is None else report.step,
        "reward": metrics.get("reward"),
        "age": metrics.get("off_policy/mean"),
        "lag": round(sum(lags)) if lags else None,
    }
