"""The gateway's metrics."""

from dataclasses import dataclass

from streamrl.observability.metrics.families import ANSWER_SECONDS, Family, Meters
from streamrl.producers.gateway.gateway import Gateway

FAMILIES = (
    Family("gateway_requests", "counter", "Requests answered; status 499: the requester left.", ("route", "status")),
    Family(
        "gateway_request_duration_seconds",
        "histogram",
        "From a request to the last byte of its answer.",
        ("route",),
        ANSWER_SECONDS,
    ),
    Family("gateway_first_token_seconds", "histogram", "From a request to its first token.", (), ANSWER_SECONDS),
    Family("gateway_workers", "gauge", "Workers that take requests."),
    Family("gateway_running_completions", "gauge", "Completions being sampled for requesters."),
    Family("gateway_queued_completions", "gauge", "Completions that wait for a slot."),
    Family("gateway_generated_tokens", "counter", "Tokens sampled for requesters."),
    Family("gateway_lost_completions", "counter", "Completions that ended with a worker's error."),
    Family("gateway_feedback_kept", "counter", "Requests kept for feedback."),
    Family("gateway_feedback_dropped", "counter", "Kept requests that got no feedback in time, or were too many."),
    Family("gateway_feedback_delivered", "counter", "Trajectories with a reward that were published."),
    Family(
        "gateway_constrained_completions", "counter", "Completions not trained on because a format was forced on them."
    ),
    Family("gateway_sessions", "gauge", "Open sessions, which become trajectories."),
    Family("gateway_session_turns", "counter", "Calls of sessions that were sampled."),
    Family("gateway_session_splits", "counter", "Calls with a rewritten history, which split their trajectory."),
    Family("gateway_sessions_dropped", "counter", "Sessions that were never ended, or were too many."),
)


@dataclass(frozen=True)
class GatewayMeter:
    """A ``RequestObserver`` that counts the gateway's answers."""

    meters: Meters

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request was answered completely, or abandoned."""
        self.meters.count("gateway_requests", route, str(status))
        self.meters.observe(seconds, "gateway_request_duration_seconds", route)

    def first_token(self, seconds: float) -> None:
        """A request's first token arrived ``seconds`` after the request."""
        self.meters.observe(seconds, "gateway_first_token_seconds")


def collect(gateway: Gateway, meters: Meters) -> None:
    """Export the gateway's load, and its counts of feedback and sessions."""
    pool, feedback, sessions = gateway.pool, gateway.desk.store.counts, gateway.book.counts
    meters.set(len(pool.ready), "gateway_workers")
    meters.set(pool.running, "gateway_running_completions")
    meters.set(len(pool.queued), "gateway_queued_completions")
    meters.count_to(pool.generated_tokens, "gateway_generated_tokens")
    meters.count_to(pool.lost, "gateway_lost_completions")
    meters.count_to(feedback.kept, "gateway_feedback_kept")
    meters.count_to(feedback.dropped + feedback.expired, "gateway_feedback_dropped")
    meters.count_to(feedback.delivered, "gateway_feedback_delivered")
    meters.count_to(feedback.constrained, "gateway_constrained_completions")
    meters.set(len(gateway.book), "gateway_sessions")
    meters.count_to(sessions.turns, "gateway_session_turns")
    meters.count_to(sessions.splits, "gateway_session_splits")
    meters.count_to(sessions.dropped, "gateway_sessions_dropped")
