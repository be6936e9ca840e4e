"""All metrics that processes export, as data, and the meters of one process, which make families on first use.

Names follow Prometheus's rules: a prefix, base units, ``_total`` for counters. All have the label ``run`` besides their
own. No label holds a prompt, a group or a trajectory, since their number is unbounded.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "streamrl_"
RUN = "run"
# Buckets in seconds: steps last from a tenth of a second (emulated) to half an hour; a broker answers within
# milliseconds, or not before the delivery deadline; a requester waits for a first token or for a whole completion.
STEP_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
ANSWER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SEND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Family:
    """One metric. ``name``: without the prefix and, for counters, without ``_total``. ``buckets``: in seconds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_EVERYWHERE = (
    Family("build_info", "gauge", "Always 1; labels identify the process.", ("version", "process", "role")),
    Family("event_loop_lag_seconds", "gauge", "How late the event loop ran a timer, last time."),
    Family("bus_published_records", "counter", "Records handed to the broker.", ("topic",)),
    Family("bus_published_bytes", "counter", "Bytes of values handed to the broker, uncompressed.", ("topic",)),
    Family("bus_consumed_records", "counter", "Records read.", ("topic",)),
    Family("bus_consumed_bytes", "counter", "Bytes of values read, uncompressed.", ("topic",)),
    Family("bus_publish_failures", "counter", "Records that failed to be sent, or may have.", ("topic", "error")),
    Family("process_cpu_cores", "gauge", "Processor cores that the process and its children use."),
    Family("process_tree_memory_bytes", "gauge", "Resident memory of the process and its children."),
    Family("machine_cpu_ratio", "gauge", "Share of all cores of the machine in use.", ("host",)),
    Family("machine_memory_used_bytes", "gauge", "Memory of the machine in use.", ("host",)),
    Family("machine_memory_bytes", "gauge", "Memory of the machine.", ("host",)),
    Family("gpu_utilization_ratio", "gauge", "Share of the time in which a GPU computes.", ("host", "gpu", "device")),
    Family("gpu_memory_used_bytes", "gauge", "Memory of a GPU in use.", ("host", "gpu", "device")),
    Family("gpu_memory_bytes", "gauge", "Memory of a GPU.", ("host", "gpu", "device")),
    Family(
        "bus_publish_duration_seconds", "histogram", "From hand-over to the broker's answer.", ("topic",), SEND_SECONDS
    ),
)
_TRAINER = (
    Family("trainer_steps", "counter", "Optimizer steps taken.", ("algorithm",)),
    Family("trainer_refused_steps", "counter", "Gradients that were not applied.", ("algorithm",)),
    Family("trainer_step_duration_seconds", "histogram", "Duration of whole steps.", ("algorithm",), STEP_SECONDS),
    Family("trainer_phase_seconds", "counter", "Time of steps by phase.", ("algorithm", "phase")),
    Family("trainer_policy_version", "gauge", "Optimizer steps in the weights.", ("algorithm",)),
    Family("trainer_policy_lineage", "gauge", "How often the trainer started or resumed.", ("algorithm",)),
    Family("trained_trajectories", "counter", "Trajectories that entered a gradient.", ("algorithm",)),
    Family("trained_groups", "counter", "Groups that were trained.", ("algorithm",)),
    Family("trained_tokens", "counter", "Completion tokens of trained groups.", ("algorithm",)),
    Family("skipped_trajectories", "counter", "Trajectories that were not trained.", ("algorithm", "reason")),
    Family("dead_letters", "counter", "Records that did not decode.", ("error",)),
    Family("unfinished_trajectories", "gauge", "Neither trained nor skipped yet.", ("algorithm", "bucket")),
    Family("ingest_latency_seconds", "gauge", "Mean time from a completion's end to its ingest.", ("algorithm",)),
    Family("ingest_pending_bytes", "gauge", "Bytes of trajectories held in memory.", ("algorithm",)),
    Family("staleness_mean_versions", "gauge", "Mean age in steps of the last step's samples.", ("algorithm",)),
    Family("staleness_max_versions", "gauge", "Largest age in steps of the last step's samples.", ("algorithm",)),
    Family("reward_mean", "gauge", "Mean reward in the last step.", ("algorithm",)),
    Family("reward_zero_std_ratio", "gauge", "Share of groups whose rewards are all equal.", ("algorithm",)),
    Family("completion_length_mean_tokens", "gauge", "Mean completion length in the last step.", ("algorithm",)),
    Family("completion_clipped_ratio", "gauge", "Share of completions cut at the length limit.", ("algorithm",)),
    Family("step_metric", "gauge", "Any metric of the last step under TRL's name.", ("algorithm", "name")),
    Family("last_step_timestamp_seconds", "gauge", "When the last step was reported, since the epoch.", ("algorithm",)),
)
_WORKER = (
    Family("worker_generated_tokens", "counter", "Tokens sampled.", ("worker",)),
    Family("worker_finished_trajectories", "counter", "Completions finished.", ("worker",)),
    Family("worker_running_completions", "gauge", "Completions being sampled.", ("worker",)),
    Family("worker_waiting_completions", "gauge", "Completions waiting in the engine.", ("worker",)),
    Family("worker_capacity_completions", "gauge", "Completions that can be sampled at once.", ("worker",)),
    Family("worker_policy_version", "gauge", "Optimizer steps in the worker's weights.", ("worker",)),
    Family("worker_state", "gauge", "1 for the worker's current state, else 0.", ("worker", "state")),
)
_DISPATCHER = (
    Family("dispatcher_groups_in_flight", "gauge", "Groups admitted and not ended."),
    Family("dispatcher_samples_missing", "gauge", "Samples ordered and not on the topic yet."),
    Family("dispatcher_workers_ready", "gauge", "Workers that can take orders."),
    Family("dispatcher_prompt_cursor", "gauge", "Next position in the prompt source."),
    Family("dispatcher_admitted_groups", "counter", "Groups sent to a worker for the first time."),
    Family("dispatcher_reordered_groups", "counter", "Groups sent again after a worker was lost."),
    Family("dispatcher_moved_groups", "counter", "Groups that repack moved to another worker."),
    Family("dispatcher_given_up_groups", "counter", "Groups given up after too many orders."),
    Family("length_prediction_error_tokens", "gauge", "Mean absolute error of the median estimate."),
    Family("length_prediction_coverage_ratio", "gauge", "Share of completions within the upper estimate."),
)
_COORDINATOR = (
    Family("workers", "gauge", "Number of workers by state.", ("standing",)),
    Family("announced_policy_version", "gauge", "Optimizer steps in the last announced weights."),
    Family("weights_announced", "counter", "Weight versions announced."),
    Family("flow_mode", "gauge", "1 for the current mode, else 0.", ("mode",)),
    Family("run_finished", "gauge", "1 once the last step was taken."),
    Family("consumer_lag_records", "gauge", "Records after the committed offset.", ("topic", "partition", "group")),
)
_RELAY = (
    Family("relay_requests", "counter", "Requests answered.", ("status",)),
    Family("weight_transfer_bytes", "counter", "Bytes of weights sent."),
)
_AUDIT = (
    Family("audit_balanced", "gauge", "1 while every trajectory has exactly one fate, else 0.", ("algorithm",)),
    Family("audit_problems", "counter", "Violations found.", ("algorithm", "kind")),
    Family("audit_trained_trajectories", "gauge", "Trained in surviving lineages.", ("algorithm",)),
    Family("audit_skipped_trajectories", "gauge", "Skipped in surviving lineages.", ("algorithm",)),
    Family("audit_pending_trajectories", "gauge", "Neither trained nor skipped yet.", ("algorithm",)),
    Family("audit_lag_records", "gauge", "Records that the audit has not read yet."),
    Family("audit_duration_seconds", "gauge", "Duration of the last audit of new records."),
    Family("last_audit_timestamp_seconds", "gauge", "When the last audit ended, since the epoch."),
)
CORE_FAMILIES: tuple[Family, ...] = (
    *_EVERYWHERE,
    *_TRAINER,
    *_WORKER,
    *_DISPATCHER,
    *_COORDINATOR,
    *_RELAY,
    *_AUDIT,
)

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


@dataclass
class Meters:
    """The meters of one process. Callers give label values in the family's order.

    ``families``: all that may be measured: the core's, and those that the process's feature adds.
    """

    run: str
    families: tuple[Family, ...] = CORE_FAMILIES
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _counters: dict[tuple[str, ...], Counter] = field(default_factory=dict)
    _gauges: dict[tuple[str, ...], Gauge] = field(default_factory=dict)
    _histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)
    _families: dict[str, Counter | Gauge | Histogram] = field(default_factory=dict)
    _totals: dict[tuple[str, ...], float] = field(default_factory=dict)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter."""
        # children are cached here: the client's ``labels`` takes a lock and checks all values at each call
        key = (name, *labels)
        if (counter := self._counters.get(key)) is None:
            counter = self._counters[key] = self._family(name, Counter).labels(self.run, *labels)
        counter.inc(by)

    def count_to(self, total: float, name: str, *labels: str) -> None:
        """Bring a counter to a total that is counted elsewhere. If that count restarted, the total is added."""
        key = (name, *labels)
        before = self._totals.get(key, 0.0)
        self._totals[key] = total
        # a smaller total was counted from 0 again: Prometheus's counters never fall
        self.count(name, *labels, by=total - before if total >= before else total)

    def set(self, value: float, name: str, *labels: str) -> None:
        """Set a gauge."""
        key = (name, *labels)
        if (gauge := self._gauges.get(key)) is None:
            gauge = self._gauges[key] = self._family(name, Gauge).labels(self.run, *labels)
        gauge.set(value)

    def set_one_of(self, name: str, chosen: str, choices: tuple[str, ...], *labels: str) -> None:
        """Set the gauge of one choice to 1 and those of the others to 0. The choice is the last label."""
        for choice in choices:  # all: a gauge keeps its last value until it is set again
            self.set(float(choice == chosen), name, *labels, choice)

    def observe(self, value: float, name: str, *labels: str) -> None:
        """Add a value to a histogram."""
        key = (name, *labels)
        if (histogram := self._histograms.get(key)) is None:
            histogram = self._histograms[key] = self._family(name, Histogram).labels(self.run, *labels)
        histogram.observe(value)

    def forget(self, name: str) -> None:
        """Drop all label values of a gauge."""
        # in both places: a child still cached here would be set but not exported
        self._gauges = {key: gauge for key, gauge in self._gauges.items() if key[0] != name}
        if name in self._families:
            self._families[name].clear()

    def _family(self, name: str, kind: type[Metric]) -> Metric:
        # made on first use, so that a process exports only its own metrics, not those of other roles
        known = self._families.get(name)
        if known is None:
            family: Family = {one.name: one for one in self.families}[name]
            labels = (RUN, *family.labels)
            more: dict[str, Any] = {"buckets": family.buckets} if family.buckets else {}
            # the client itself appends ``_total`` to a counter's name
            known = self._families[name] = kind(PREFIX + name, family.help, labels, registry=self.registry, **more)
        assert isinstance(known, kind), f"{name} is not a {kind.__name__}"
        return known
