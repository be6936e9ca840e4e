"""What displays show of instances: each one's mode and newest step, whether a served one is alive, a split's arms."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.observability.run_state.aggregates import EventLog
from streamrl.observability.run_state.parts import RunPart, Section
from streamrl.observability.run_state.state import lag_at
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.policies.splitting import ArmRewards
from streamrl.schemas.control import InstanceState, PolicySplit, Served
from streamrl.schemas.identifiers import SERVED_ARM, SERVED_POLICY, named_version, policy_in, scope_of
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import StepReport, TrainerBeat
from streamrl.schemas.topics import HEARTBEATS, STEPS

MOST = 64
"""Most instances that are kept: names come from operators."""
SILENT_AFTER_S = 10.0
"""Seconds of ten heartbeats: a trainer may pause for a moment when it starts a new lineage."""


@dataclass
class Instances(RunPart):
    """The instances of a run, by name.

    ``served``: the policy whose weights the workers follow. ``heard_at``: time of a policy's last heartbeat, step or
    promotion, in epoch seconds. ``told``: the state that the coordinator announced last. ``rewards``: of the
    trajectories that each arm of the split has sampled since it was ordered. ``ends``: of the trajectories' topic, by
    length bucket.
    """

    run: str
    served: str = SERVED_POLICY
    heard_at: dict[str, float] = field(default_factory=dict)
    told: dict[str, InstanceState] = field(default_factory=dict)
    newest: dict[str, StepReport] = field(default_factory=dict)
    split: PolicySplit | None = None
    rewards: ArmRewards = field(default_factory=ArmRewards)
    ends: Mapping[int, int] = field(default_factory=dict)

    def observe(self, message: Message, log: EventLog) -> None:
        """See ``RunPart``."""
        match message:
            case InstanceState() if self._set_state(message):
                state = {"run": "works", "pause": "is paused", "detached": "was detached"}[message.mode]
                log.add(message.sent_at, "info", f"instance {message.policy} {state}")
            case Served() if self._set_served(message):
                log.add(message.sent_at, "info", f"{message.policy} is served from now on", mark="promotion")
            case PolicySplit() if self._set_split(message):
                shares = ", ".join(f"{arm.policy} {arm.share:.3g}" for arm in message.arms)
                event = f"groups are split: {shares}" if shares else "the served policy samples everything again"
                log.add(message.sent_at, "info", event)
            case TrainerBeat():
                self._heard(message.policy, message.sent_at)
            case StepReport() if message.policy != policy_in(self.run):
                self._step(message)

    def sampled(self, summary: TrajectorySummary) -> None:
        """See ``RunPart``."""
        if self.split is not None and self.split.arms:
            self.rewards.add(summary.policy, summary.reward)

    def note_ends(self, ends: Mapping[int, int]) -> None:
        """See ``RunPart``."""
        self.ends = ends

    @property
    def topics(self) -> frozenset[str]:
        """The topics with steps and heartbeats of the known instances."""
        scopes = [scope_of(self.run, name) for name in self.told]
        return frozenset(topic.full_name(scope) for scope in scopes for topic in (STEPS, HEARTBEATS))

    @property
    def own_trainer_leads(self) -> bool:
        """Whether the run's own trainer is served. An instance's number of steps says nothing about the run."""
        return self.served == SERVED_POLICY

    def warning(self, now: float) -> str | None:
        """A hint if the served policy's trainer is silent, since no supervisor of the run restarts it."""
        if (name := self._missing(now)) is None:
            return None
        return (
            f"{name} is served and silent, workers wait for its weights: `streamrl attach {name} --run {self.run}` "
            f"restarts it, `streamrl promote {SERVED_POLICY} --run {self.run}` continues without it"
        )

    @property
    def warning_topics(self) -> frozenset[str]:
        """The topic with heartbeats of the served instance."""
        if self.served == SERVED_POLICY:
            return frozenset()
        return frozenset({HEARTBEATS.full_name(scope_of(self.run, self.served))})

    @property
    def sections(self) -> Mapping[str, Section]:
        """``instances``, and the ``arms`` of a split."""
        return {"instances": self.rows, "arms": lambda _now: self._arms()}

    def status_lines(self) -> Iterator[str]:
        """One line per instance."""
        for name, state in sorted(self.told.items()):
            mode = f"{state.mode}, served" if name == self.served else state.mode
            yield f"instance  {name} ({state.algorithm}): {mode}; `streamrl algorithms ls` shows more"

    def rows(self, now: float) -> list[dict[str, Any]]:
        """One row per instance.

        ``age``: in served versions; ``lag``: records that it has not finished; ``quiet_s``: seconds since its newest
        step; all None before its first step. ``silent``: workers wait for its weights, and it sends no heartbeats.
        """
        return [self._row(name, now) for name in sorted(self.told)]

    def _row(self, name: str, now: float) -> dict[str, Any]:
        state, report = self.told[name], self.newest.get(name)
        return {
            "name": name,
            "algorithm": state.algorithm,
            "mode": state.mode,
            "served": name == self.served,
            "silent": name == self._missing(now),
            **standing(report, self.ends),
            "quiet_s": None if report is None else round(max(0.0, now - report.sent_at)),
        }

    def _arms(self) -> list[dict[str, Any]]:
        """One row per arm, the served policy's last; empty without a split. ``workers`` None: all other workers."""
        if self.split is None or not self.split.arms:
            return []
        shares = self.split.shares
        shares = {**shares, "": max(0.0, 1.0 - sum(shares.values()))}
        found = []
        for arm, share in shares.items():
            count, mean = self.rewards.of(arm)
            workers = sum(dealt == arm for dealt in self.split.workers.values()) if arm else None
            row = {"name": arm or SERVED_ARM, "share": round(share, 6), "workers": workers}
            found.append({**row, "sampled": count, "reward": None if mean is None else round(mean, 4)})
        return found

    def _set_split(self, message: PolicySplit) -> bool:
        """Note a split; returns whether its shares are new."""
        before = {} if self.split is None else self.split.shares
        self.split, is_news = message, message.shares != before
        if is_news:
            self.rewards = ArmRewards()
        return is_news

    def _set_state(self, message: InstanceState) -> bool:
        """Note an instance's state; returns whether its mode is new."""
        before = self.told.get(message.policy)
        if before is None and len(self.told) >= MOST:
            return False
        self.told[message.policy] = message
        return before is None or before.mode != message.mode

    def _set_served(self, message: Served) -> bool:
        """Note which policy is served; returns whether it is another one."""
        is_news, self.served = message.policy != self.served, message.policy
        self._heard(message.policy, message.sent_at)
        return is_news

    def _heard(self, policy: str | None, at: float) -> None:
        if policy is not None and (policy in self.told or policy == self.served):
            self.heard_at[policy] = max(at, self.heard_at.get(policy, at))

    def _missing(self, now: float) -> str | None:
        """The served instance if it is silent, so that workers wait for its weights; else None."""
        is_silent = now - self.heard_at.get(self.served, now) > SILENT_AFTER_S
        return self.served if is_silent and self.served != SERVED_POLICY else None

    def _step(self, report: StepReport) -> None:
        """Note a known instance's step; a late one of an older lineage is ignored."""
        if report.policy not in self.told:
            return
        self._heard(report.policy, report.sent_at)
        known = self.newest.get(report.policy)
        if known is None or report.version >= known.version:
            self.newest[report.policy] = report


def standing(report: StepReport | None, ends: Mapping[int, int] | None = None) -> dict[str, Any]:
    """What every display shows of a trainer's newest step.

    ``version`` and ``step``, the ``reward``, the mean ``age`` of the trained trajectories, and the ``lag``, in
    trajectories that it has not finished. A value is None before the first step, or if the report lacks it. ``ends``:
    ends of the trajectories' topic by length bucket; with them, trajectories since the step count as well.
    """
    metrics = {} if report is None else report.metrics
    lags = {} if report is None else lag_at(metrics, ends or {})
    return {
        "version": None if report is None else named_version(report.policy, report.version),
        "step": None if report is None else report.step,
        "reward": metrics.get("reward"),
        "age": metrics.get("off_policy/mean"),
        "lag": sum(lags.values()) if lags else None,
    }
