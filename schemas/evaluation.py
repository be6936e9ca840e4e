"""Evaluation during training: orders for samples of held-out prompts, and the results of a weights version.

Evaluation has its own message kinds and topics. A trainer reads none of these topics, and a worker that does not know
evaluation orders takes none.
"""

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import LengthEstimate, Prompt, SamplingParams, ShortText, WorkOrder

EVALUATED = "evaluated"
"""Key that only evaluation lines of ``metrics.jsonl`` have; its value is the evaluated version."""

PROMPTS = "prompts"
"""Key of the number of held-out prompts in the same lines."""


class EvaluationOrder(Message):
    """Evaluator → one process of a worker: sample these completions of a held-out prompt during training.

    ``version`` is the weights version to evaluate; the worker holds it or a newer one. ``sample_indices`` lists the
    samples still wanted, from 0 to ``num_generations`` - 1.
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
        """The same order in the form that a rollout takes. Its stream position and length estimate are placeholders."""
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
    """Evaluator → evaluations topic: results on held-out prompts at a weights version; one report per version.

    ``metrics`` has ``eval/<set>/pass@k`` and others, and ``eval/pass@k`` over all sets. ``samples`` counts the samples
    made; ``missing`` counts those given up, which count as failed. ``oldest`` and ``newest`` are the oldest and newest
    weights that sampled a token. A worker that adopts newer weights during a completion continues with them.
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


class HeldOut(NamedTuple):
    """A measure of held-out prompts at the first and at the last weights that were evaluated.

    ``steps``: of these weights; ``prompts``: their number, 0 if it is not known; ``conditions``: where the prompts are
    from and how they were sampled, in words that follow "prompts".
    """

    measure: str
    before: float
    after: float
    steps: tuple[int, int]
    prompts: int = 0
    conditions: str = ""

    @property
    def measured_on(self) -> str:
        """The prompts and the conditions."""
        return f"{f'{self.prompts:,} ' if self.prompts else ''}prompts {self.conditions}".strip()
