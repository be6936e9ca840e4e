"""Every metric that processes export, as data: its name, kind, labels and what it says. Knows no library.

Names are Prometheus's: a prefix, base units, ``_total`` for counters. All have the label ``run`` besides their own; no
label ever holds a prompt, a group or a trajectory.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "streamrl_"
RUN = "run"
STEP_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
SEND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Family:
    """``name`` without the prefix and, for counters, without ``_total``. ``buckets``: of a histogram, in seconds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of its time series."""
        full = PREFIX + self.name
        match self.kind:
            case "counter":
                return (f"{full}_total",)
            case "histogram":
                return (f"{full}_bucket", f"{full}_sum", f"{full}_count")
            case "gauge":
                return (full,)


_EVERYWHERE = (
    Family("build_info", "gauge", "1; the labels say which process this is.", ("version", "process", "role")),
    Family("event_loop_lag_seconds", "gauge", "How late the event loop was when it was last looked at."),
    Family("bus_published_records", "counter", "Records handed to the broker.", ("topic",)),
    Family("bus_published_bytes", "counter", "Bytes of values handed to the broker, uncompressed.", ("topic",)),
    Family("bus_consumed_records", "counter", "Records read.", ("topic",)),
    Family("bus_consumed_bytes", "counter", "Bytes of values read, uncompressed.", ("topic",)),
    Family("bus_publish_failures", "counter", "Records whose sending failed or is unknown.", ("topic", "error")),
    Family("bus_publish_duration_seconds", "histogram", "From handing over to the answer.", ("topic",), SEND_SECONDS),
)
_TRAINER = (
    Family("trainer_steps", "counter", "Optimizer steps taken.", ("algorithm",)),
    Family("trainer_refused_steps", "counter", "Gradients that were not applied.", ("algorithm",)),
    Family("trainer_step_duration_seconds", "histogram", "Of whole steps.", ("algorithm",), STEP_SECONDS),
    Family("trainer_phase_seconds", "counter", "Time of steps by what it went to.", ("algorithm", "phase")),
    Family("trainer_policy_version", "gauge", "Optimizer steps in the weights.", ("algorithm",)),
    Family("trainer_policy_lineage", "gauge", "Lives of the trainer so far.", ("algorithm",)),
    Family("trained_trajectories", "counter", "Trajectories that entered a gradient.", ("algorithm",)),
    Family("trained_groups", "counter", "Groups that were trained.", ("algorithm",)),
    Family("trained_tokens", "counter", "Completion tokens of trained groups.", ("algorithm",)),
    Family("skipped_trajectories", "counter", "Trajectories that were not trained.", ("algorithm", "reason")),
    Family("dead_letters", "counter", "Records that did not decode.", ("error",)),
    Family("unfinished_trajectories", "gauge", "On the topic and not trained or skipped.", ("algorithm", "bucket")),
    Family("intake_latency_seconds", "gauge", "Mean time from a completion's end to its reading.", ("algorithm",)),
    Family("intake_pending_bytes", "gauge", "Trajectories held in memory.", ("algorithm",)),
    Family("staleness_mean_versions", "gauge", "Mean age in steps of what the last step trained.", ("algorithm",)),
    Family("staleness_max_versions", "gauge", "Largest age in steps of what the last step trained.", ("algorithm",)),
    Family("reward_mean", "gauge", "Mean reward in the last step.", ("algorithm",)),
    Family("reward_zero_std_ratio", "gauge", "Share of groups without any advantage.", ("algorithm",)),
    Family("completion_length_mean_tokens", "gauge", "Mean completion in the last step.", ("algorithm",)),
    Family("completion_clipped_ratio", "gauge", "Share cut at the length limit.", ("algorithm",)),
    Family("step_metric", "gauge", "Any metric of the last step under TRL's name.", ("algorithm", "name")),
    Family("last_step_timestamp_seconds", "gauge", "When the last step was reported, since the epoch.", ("algorithm",)),
)
_WORKER = (
    Family("worker_generated_tokens", "counter", "Tokens sampled.", ("worker",)),
    Family("worker_finished_trajectories", "counter", "Completions finished.", ("worker",)),
    Family("worker_running_completions", "gauge", "Completions being sampled.", ("worker",)),
    Family("worker_waiting_completions", "gauge", "Completions waiting in the engine.", ("worker",)),
    Family("worker_capacity_completions", "gauge", "Completions that are sampled at once.", ("worker",)),
    Family("worker_policy_version", "gauge", "Optimizer steps in the weights it samples with.", ("worker",)),
    Family("worker_state", "gauge", "1 for the state it is in.", ("worker", "state")),
)
_DISPATCHER = (
    Family("dispatcher_groups_in_flight", "gauge", "Groups admitted and not ended."),
    Family("dispatcher_samples_missing", "gauge", "Samples ordered and not on the topic."),
    Family("dispatcher_workers_ready", "gauge", "Workers that orders may go to."),
    Family("dispatcher_prompt_cursor", "gauge", "Next position of the prompt source."),
    Family("dispatcher_admitted_groups", "counter", "Groups sent to a worker for the first time."),
    Family("dispatcher_reordered_groups", "counter", "Groups sent again after a worker was lost."),
    Family("dispatcher_given_up_groups", "counter", "Groups that were ordered too often."),
    Family("length_prediction_error_tokens", "gauge", "Mean absolute error of the median estimate."),
    Family("length_prediction_coverage_ratio", "gauge", "Share of completions within the upper estimate."),
)
_COORDINATOR = (
    Family("workers", "gauge", "Workers by how the coordinator sees them.", ("standing",)),
    Family("announced_policy_version", "gauge", "Optimizer steps in the weights announced last."),
    Family("weights_announced", "counter", "Weight versions announced."),
    Family("flow_mode", "gauge", "1 for the mode that holds.", ("mode",)),
    Family("run_finished", "gauge", "1 once the last step was taken."),
    Family("consumer_lag_records", "gauge", "Behind the end, by committed offsets.", ("topic", "partition", "group")),
)
_RELAY = (
    Family("relay_requests", "counter", "Requests answered.", ("status",)),
    Family("weight_transfer_bytes", "counter", "Bytes of weights that workers were sent."),
)
FAMILIES: tuple[Family, ...] = (*_EVERYWHERE, *_TRAINER, *_WORKER, *_DISPATCHER, *_COORDINATOR, *_RELAY)
BY_NAME = {family.name: family for family in FAMILIES}
