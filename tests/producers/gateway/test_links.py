"""A sequence between its requester and a worker, without either."""

from streamrl.producers.gateway.links import SequenceRequest, ServedSequence, WorkerLink, WorkerPool
from streamrl.producers.gateway.refusals import ApiError, unavailable
from streamrl.producers.gateway.worker_requests import SampledTokens, WorkerCard
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import LengthEstimate, SamplingParams

VERSION = PolicyVersion(1, 0)
ESTIMATE = LengthEstimate(median=1, upper=2, bucket=0, predictor="p")


def test_a_sequence_ends_once() -> None:
    told: list[SampledTokens | ApiError] = []
    pool = WorkerPool("secret", max_queued=1, queue_timeout_s=1.0)
    link = WorkerLink("w", "ws://nowhere", pool)
    link.card = WorkerCard(worker_id="w", slots=1, takes_requests=True, version=VERSION, running=0)
    sequence = ServedSequence(SequenceRequest([1], SamplingParams(max_completion_length=4), ESTIMATE), told.append)
    link.start(sequence)
    last = SampledTokens(sequence.name, [2], [-0.5], VERSION, "stop")
    link._sampled(last)
    link._sampled(last)
    link._failed(sequence.name, "error", "too late")
    pool.end(sequence, unavailable("too late"))
    link._lost()
    assert told == [last]
