"""Evaluation during training: orders for samples of held-out prompts, and what came of a weights version.

Kinds and topics of their own: what is sampled here is on no topic that a trainer reads, and a worker that does not know
these orders takes none of them.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import LengthEstimate, Prompt, SamplingParams, ShortText, WorkOrder

EVALUATED = "evaluated"
"""Key of a line of ``metrics.jsonl`` that is an evaluation's: the version; a step's line has none."""


class EvaluationOrder(Message):
    """Evaluator → one process of a worker: sample these completions of a held-out prompt, beside what is trained.

    ``version``: the weights that are evaluated; the worker holds them or newer ones. ``sample_indices``: of 0 to
    ``num_generations`` - 1, those still wanted.
    """

    SCHEMA: ClassVar[str] = "evaluation-order"
    MAX_BYTES: ClassVar[int] = 4 << 20

    group_id: ShortText
    worker_id: ShortText
    incarnation: ShortText
    prompt: Prompt
    sampling: SamplingParams
    num_generations: Annotated[int, Field(ge=1, le=4096)]
    sample_indices: tuple[int, ...]
    attempt: Annotated[int, Field(ge=0)] = 0
    version: PolicyVersion
    created_at: float

    def work_order(self) -> WorkOrder:
        """The same as what a rollout takes: it has no place in any stream, and no estimate."""
        return WorkOrder(
            group_id=self.group_id,
            worker_id=self.worker_id,
            position=0,
            prompt=self.prompt,
            estimate=LengthEstimate(median=1, upper=1, bucket=0, predictor="none"),
            sampling=self.sampling,
            num_generations=self.num_generations,
            sample_indices=self.sample_indices,
            partition=0,
            attempt=self.attempt,
            incarnation=self.incarnation,
            admitted_version=self.version,
            created_at=self.created_at,
        )


class EvaluationReport(Message):
    """Evaluator → evaluations topic: what held-out prompts came to at a weights version; one a version.

    ``metrics``: ``eval/<set>/pass@k`` and others, and ``eval/pass@k`` over all sets. ``samples`` of them were made,
    ``missing`` were given up and count as failed. ``oldest`` and ``newest``: of the weights that sampled a token of
    them; a worker that adopts newer weights on the way goes on with those.
    """

    SCHEMA: ClassVar[str] = "evaluation-report"

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    metrics: dict[str, float]
    prompts: Annotated[int, Field(ge=0)]
    samples: Annotated[int, Field(ge=0)]
    missing: Annotated[int, Field(ge=0)] = 0
    oldest: PolicyVersion
    newest: PolicyVersion
    began_at: float
    sent_at: float
