"""The transformers decoder: completions in slots, one decode step for all, refilled as they end.

Only the prompt's prefix is prefilled; its last token goes through the first decode step, so that there is one place
where tokens are sampled. Samples of one prompt that start together share one prefill. A prefill costs about half a
decode step however small it is, so freed slots are refilled once they have idled for as much as that.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from producers.generation.engines.decoder import Completion
from producers.generation.engines.facts import ModelFacts, read_facts
from producers.generation.engines.slots.model import SlotModel
from producers.generation.engines.slots.sampling import RowSampler
from producers.generation.engines.weights import read_weights
from producers.generation.settings import GenerationSettings
from schemas.errors import EngineError
from schemas.messages.trajectories import FinishReason


@dataclass(slots=True)
class _Batch:
    """Tensors of the running rows; rebuilt when rows come or go."""

    tokens: torch.Tensor
    positions: torch.Tensor
    longest: int
    sampler: RowSampler


class SlotDecoder:
    """A ``Decoder`` over transformers models, on a CPU or CUDA device."""

    name = "transformers"

    def __init__(self, model_path: str, settings: GenerationSettings) -> None:
        self._model_path = model_path
        self._settings = settings
        self._waiting: deque[Completion] = deque()
        self._rows: list[Completion] = []
        self._batch: _Batch | None = None
        self._idle_slots = 0
        self._model: SlotModel
        self._facts: ModelFacts

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._rows or self._waiting)

    def load(self) -> ModelFacts:
        """See ``Decoder``."""
        torch.set_num_threads(self._settings.threads)
        self._facts = read_facts(self._model_path, self._settings.max_model_len)
        self._model = SlotModel(self._model_path, self._facts, self._settings)
        return self._facts

    def add(self, completion: Completion) -> None:
        """See ``Decoder``."""
        self._waiting.append(completion)

    @torch.inference_mode()
    def drop(self, completion: Completion) -> None:
        """See ``Decoder``."""
        if completion in self._waiting:
            self._waiting.remove(completion)
        elif completion in self._rows:
            self._vacate([self._rows.index(completion)])

    def clear(self) -> None:
        """See ``Decoder``."""
        self._waiting.clear()
        self._rows.clear()
        self._batch = None
        self._model.cache.release()

    def read_weights(self, directory: Path) -> dict[str, torch.Tensor]:
        """See ``Decoder``."""
        return read_weights(directory, self._facts.tensors)

    def adopt(self, weights: dict[str, torch.Tensor]) -> None:
        """See ``Decoder``."""
        self._model.adopt(weights)

    def close(self) -> None:
        """See ``Decoder``."""
        self.clear()

    @torch.inference_mode()
    def step(self) -> Iterable[Completion]:
        """See ``Decoder``."""
        self._admit()
        batch = self._batch or self._gather()
        self._model.cache.reserve(len(self._rows), batch.longest, len(self._rows), batch.longest - 1)
        logits = self._model.decode(batch.tokens, batch.positions, batch.longest)
        batch.tokens, logprobs = batch.sampler.sample(logits)
        batch.positions = batch.positions + 1
        batch.longest += 1
        self._batch = batch
        sampled, chosen = torch.stack((batch.tokens.double(), logprobs.double())).tolist()
        if not math.isfinite(sum(chosen)):
            raise EngineError("expected finite log-probabilities, got NaN or infinity; check the weights in use")
        return self._record(sampled, chosen)

    def _record(self, sampled: Sequence[float], logprobs: Sequence[float]) -> Iterable[Completion]:
        advanced = list(self._rows)
        ended = []
        eos_token_ids = self._facts.eos_token_ids
        for row, completion in enumerate(advanced):
            token = int(sampled[row])
            completion.extend((token,), (logprobs[row],))
            if token in eos_token_ids:
                completion.finish_reason = FinishReason.STOP
            elif completion.generated >= completion.limit:
                completion.finish_reason = FinishReason.LENGTH
            else:
                continue
            ended.append(row)
        self._vacate(ended)
        return advanced

    def _vacate(self, ended: Sequence[int]) -> None:
        for row in reversed(ended):
            last = self._rows.pop()
            if row < len(self._rows):
                self._model.cache.move(len(self._rows), row, last.position)
                self._rows[row] = last
        if ended:
            self._batch = None
        if not self.busy:
            self._model.cache.release()

    def _admit(self) -> None:
        free = self._settings.max_num_seqs - len(self._rows)
        self._idle_slots += free
        if not free or not self._waiting or (self._rows and 2 * self._idle_slots < self._settings.max_num_seqs):
            return
        self._idle_slots = 0
        room = min(free, len(self._waiting))
        groups: dict[tuple[int, ...], list[Completion]] = {}
        for _ in range(room):
            completion = self._waiting.popleft()
            groups.setdefault(tuple(completion.request.prompt_token_ids[:-1]), []).append(completion)
        used = max((completion.position for completion in self._rows), default=0)
        longest = max(used, *(len(prefix) for prefix in groups)) + 1
        self._model.cache.reserve(len(self._rows) + room, longest, len(self._rows), used)
        spans: dict[tuple[int, ...], range] = {}
        for prefix, members in groups.items():
            spans[prefix] = range(len(self._rows), len(self._rows) + len(members))
            self._rows.extend(members)
        for chunk in self._chunks(sorted(filter(len, spans), key=len)):
            self._model.prefill(chunk, [spans[prefix] for prefix in chunk])
        self._batch = None

    def _chunks(self, prefixes: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        chunk: list[tuple[int, ...]] = []
        for prefix in prefixes:
            if chunk and len(prefix) * (len(chunk) + 1) > self._settings.max_num_batched_tokens:
                yield chunk
                chunk = []
            chunk.append(prefix)
        if chunk:
            yield chunk

    def _gather(self) -> _Batch:
        rows, device = self._rows, self._model.device
        positions = [completion.position for completion in rows]
        return _Batch(
            tokens=torch.tensor([completion.last_token for completion in rows], device=device),
            positions=torch.tensor(positions, device=device),
            longest=1 + max(positions),
            sampler=RowSampler.of(
                [completion.request.sampling for completion in rows],
                [completion.seed for completion in rows],
                [completion.generated for completion in rows],
                device,
            ),
        )
