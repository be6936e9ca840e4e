"""The transformers decoder: completions in slots, one decode step for all of them, slots refilled as completions end.

``SlotDecoder`` schedules: which completion has which row, and when waiting ones are prefilled. ``SlotModel`` runs the
model over a ``SlotCache``, whose rows have different lengths, and ``RowSampler`` draws a token for each row.

All tokens of a context but the last are prefilled. The last one goes through the first decode step, so that tokens are
sampled in one place only. Samples of one prompt that start together share a prefill. A prefill costs about half a
decode step even if it is small, so freed slots are refilled after they have been idle for about that time. If new
weights recompute the caches, they do so by the same prefill, of all running completions.

Invariants:
- logprobs_are_what_the_trainer_computes: log-probabilities are over the whole vocabulary at the sampling temperature,
  including tokens that min-p, top-k and top-p exclude;
- a_model_whose_attention_is_not_standard_is_refused: at load, slot decoding is compared with a plain forward pass.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from streamrl.producers.generation.engines.model_files import (
    ModelFacts,
    one_line,
    read_adapter,
    read_facts,
    read_weights,
)
from streamrl.producers.generation.engines.own_forward import OwnForward
from streamrl.producers.generation.engines.plain_forward import PlainForward, why_not_plain
from streamrl.producers.generation.engines.port import ActiveCompletion, refuse_schema
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError, ModelError
from streamrl.schemas.trajectories import FinishReason, SamplingParams

log = structlog.get_logger()

GREEDY_BELOW = 1e-5
"""Temperatures below this select the most likely token, with its log-probability at temperature 1."""
_ALL_MASS = 2.0
"""A top-p that no cumulative probability reaches, rounding included."""
_BLOCK = 64
"""Tokens whose probabilities are added in float32; a sum of many tokens in float64 takes most of a draw's time."""
_FEW_TOKENS = 2048
"""A vocabulary up to this size is added in float64 at once, which takes less time than finding a block first."""
_WEYL = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, made odd: splitmix64's increment."""


class SlotDecoder:
    """A ``Decoder`` over transformers models, on a CPU or CUDA device.

    ``_rows[r]`` is the completion in slot r. ``_idle_slots``: sum, over decode steps, of the empty slots.
    """

    name = "transformers"
    kv_tokens = None
    """No limit: every slot has room for the longest completion."""

    def __init__(self, model_path: str, settings: GenerationSettings) -> None:
        self._model_path = model_path
        self._settings = settings
        self._recomputes = settings.adopt == "recompute"
        self._waiting: deque[ActiveCompletion] = deque()
        self._rows: list[ActiveCompletion] = []
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

    def give_up(self) -> None:
        """See ``Decoder``. Does nothing: files are read to their end."""

    def queue(self, completion: ActiveCompletion) -> None:
        """See ``Decoder``."""
        refuse_schema(completion.request, self.name)
        if self._recomputes:
            completion.sampled = []
        self._waiting.append(completion)

    @torch.inference_mode()
    def drop(self, completion: ActiveCompletion) -> None:
        """See ``Decoder``."""
        if completion in self._waiting:
            self._waiting.remove(completion)
        elif completion in self._rows:
            self._vacate([self._rows.index(completion)])

    def pause(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``. Nothing is sampled ahead."""
        return ()

    def clear(self) -> None:
        """See ``Decoder``."""
        self._waiting.clear()
        self._rows.clear()
        self._batch = None
        self._model.cache.release()

    def read_weights(self, directory: Path) -> dict[str, torch.Tensor]:
        """See ``Decoder``. For an adapter, returns the weights that it changes, with the adapter added."""
        adapter = read_adapter(directory, self._facts.tensors, self._model_path)
        if adapter is None:
            return read_weights(directory, self._facts.tensors)
        return adapter.merged(self._model.base_of(adapter.pairs))

    @torch.inference_mode()
    def adopt(self, weights: dict[str, torch.Tensor]) -> None:
        """See ``Decoder``."""
        self._model.adopt(weights)
        if self._recomputes:
            # As after any prefill, the next input token is not in the cache. Old entries are overwritten.
            self._prefill((completion.context_token_ids[:-1], [row]) for row, completion in enumerate(self._rows))

    def close(self) -> None:
        """See ``Decoder``."""
        self.clear()

    @torch.inference_mode()
    def step(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``."""
        # Every row grows by one token a step, so the last step's tensors can be used until a row comes or goes.
        self._admit()
        batch = self._batch or self._gather()
        # ``longest - 1`` positions are filled, and this step writes one more, for which room is reserved first.
        self._model.cache.reserve(len(self._rows), batch.longest, len(self._rows), batch.longest - 1)
        logits = self._model.decode(batch.tokens, batch.positions, batch.longest)
        batch.tokens, logprobs = batch.sampler.sample(logits)
        batch.positions = batch.positions + 1
        batch.longest += 1
        self._batch = batch
        # One copy from the device per step; float64 holds every token id exactly.
        sampled, chosen = torch.stack((batch.tokens.double(), logprobs.double())).tolist()
        if not math.isfinite(sum(chosen)):
            raise EngineError("expected finite log-probabilities, got NaN or infinity; check the weights in use")
        return self._record(sampled, chosen)

    def _record(self, sampled: Sequence[float], logprobs: Sequence[float]) -> Iterable[ActiveCompletion]:
        advanced = list(self._rows)
        ended = []
        ends = self._facts.ends.ids
        for row, completion in enumerate(advanced):
            token = int(sampled[row])
            completion.extend((token,), (logprobs[row],))
            if token in ends:
                completion.finish_reason = FinishReason.STOP
            elif completion.generated >= completion.limit:
                completion.finish_reason = FinishReason.LENGTH
            else:
                continue
            ended.append(row)
        self._vacate(ended)
        return advanced

    def _vacate(self, ended: Sequence[int]) -> None:
        """Free these rows, given in ascending order. The last row moves into each gap, so that none remains."""
        # In descending order, so that a row that moves into a gap has not ended itself.
        for row in reversed(ended):
            last = self._rows.pop()
            if row < len(self._rows):  # the ended row is not the last one
                # ``position`` of its tokens are in the cache: the last sampled one is written by the next step.
                self._model.cache.move(len(self._rows), row, last.position)
                self._rows[row] = last
        if ended:
            self._batch = None
        if not self.busy:  # no memory is held while nothing runs
            self._model.cache.release()

    def _admit(self) -> None:
        """Prefill waiting completions into free slots, if that is worth its time now."""
        free = self._settings.max_num_seqs - len(self._rows)
        self._idle_slots += free
        if not free or not self._waiting:
            return
        # A prefill stalls all slots for about half a decode step. It is worth that when as many slot-steps were idle,
        # or when a user waits for the first token.
        is_worth_it = not self._rows or 2 * self._idle_slots >= self._settings.max_num_seqs
        if not is_worth_it and not any(completion.request.interactive for completion in self._waiting):
            return
        self._idle_slots = 0
        room = min(free, len(self._waiting))
        # Rows by context without its last token: samples of one prompt share a prefill.
        groups: dict[tuple[int, ...], list[int]] = {}
        used = max((completion.position for completion in self._rows), default=0)
        used_rows = len(self._rows)
        for _ in range(room):
            completion = self._waiting.popleft()
            groups.setdefault(tuple(completion.context_token_ids[:-1]), []).append(len(self._rows))
            self._rows.append(completion)
        longest = max(used, *(len(prefix) for prefix in groups)) + 1
        self._model.cache.reserve(len(self._rows), longest, used_rows, used)
        self._prefill(groups.items())
        self._batch = None

    def _prefill(self, prefixes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Compute the cache of prefixes, each for its rows."""
        # Sorted by length, so that a batch has little padding. A prompt of one token has no prefix to prefill.
        for chunk in self._chunks(
            sorted(((ids, rows) for ids, rows in prefixes if ids), key=lambda pair: len(pair[0]))
        ):
            self._model.prefill([ids for ids, _ in chunk], [rows for _, rows in chunk])

    def _chunks(
        self, prefixes: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> Iterator[list[tuple[Sequence[int], Sequence[int]]]]:
        """Split prefixes, shortest first, into batches of at most ``max_num_batched_tokens``, including padding."""
        chunk: list[tuple[Sequence[int], Sequence[int]]] = []
        for prefix in prefixes:
            # All are padded to this prefix's length, so the pass computes that length × the number of prefixes.
            if chunk and len(prefix[0]) * (len(chunk) + 1) > self._settings.max_num_batched_tokens:
                yield chunk
                chunk = []
            chunk.append(prefix)
        if chunk:
            yield chunk

    def _gather(self) -> "_Batch":
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


@dataclass(slots=True)
class _Batch:
    """Tensors of the running rows; rebuilt when rows come or go."""

    tokens: torch.Tensor
    positions: torch.Tensor
    longest: int
    sampler: "RowSampler"


class SlotRows(Protocol):
    """A key-value cache of a batch: row r holds one completion's tokens, and rows in use are always the first ones."""

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """Make room for rows × length. Grows by doubling, and shrinks when a quarter would suffice."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another in all layers."""
        ...

    def release(self) -> None:
        """Release all memory."""
        ...


class SlotForward(Protocol):
    """A model's forward pass over the rows of a cache."""

    @property
    def cache(self) -> SlotRows:
        """The key-value cache of all rows."""
        ...

    def prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        """Compute each prefix once and copy it into its rows of the cache. Room must have been reserved."""
        ...

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Run the model on one token per row.

        Args:
            tokens: int64 [n], the token of rows 0..n-1.
            positions: int64 [n], the tokens' positions.
            longest: the largest position plus one.

        Returns:
            Logits [n, vocabulary].
        """
        ...


class SlotModel:
    """A causal language model and its key-value cache on one device: prefill, decode, adoption of weights in place.

    Knows nothing of requests and sampling.
    """

    def __init__(self, model_path: str, facts: ModelFacts, settings: GenerationSettings) -> None:
        self.device = _device(settings.device)
        if self.device.type == "cuda":
            log.warning("generation.engine = transformers is for CPUs and tests and slow on a GPU; use vllm")
        dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        except Exception as error:
            raise ModelError(
                f"expected loadable weights at {model_path}, got: {one_line(error)}; use a complete model directory"
            ) from error
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._base: dict[str, torch.Tensor] = {}
        check_reach(model_path, facts)
        self._forward = self._choose_forward(model_path, facts)

    def prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        """See ``SlotForward``."""
        self._forward.prefill(prefixes, rows)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """See ``SlotForward``."""
        return self._forward.decode(tokens, positions, longest)

    @property
    def cache(self) -> SlotRows:
        """The key-value cache of all rows."""
        return self._forward.cache

    def base_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors as they were loaded. They are copied at the first call, which comes before any change of them."""
        present = self._model.state_dict()
        for name in names:
            if name not in self._base:
                self._base[name] = present[name].detach().clone()
        return self._base

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy checked weights over the model's, tensor by tensor."""
        # In place, so that nothing is allocated and tied tensors stay tied.
        present = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                present[name].copy_(tensor)

    @torch.inference_mode()
    def _choose_forward(self, model_path: str, facts: ModelFacts) -> SlotForward:
        """The faster forward pass if the model is a plain decoder, else its own.

        Raises:
            ModelError: decoding by its own forward pass through slots gives other results than without them.
        """
        reason = why_not_plain(self._model)
        if not reason:
            plain = PlainForward(self._model)
            reason = self._difference(plain, facts)
        if not reason:
            return plain
        log.info("engine decodes with the model's own forward pass, which is slower", found=reason)
        own = OwnForward(self._model)
        if different := self._difference(own, facts):
            raise _unsupported(model_path, different)
        return own

    def _difference(self, forward: SlotForward, facts: ModelFacts) -> str:
        """What differs between decoding two short prompts' last tokens and the model's own pass without slots, if
        anything does.
        """
        length = min(6, facts.max_length)
        prompts = torch.arange(2 * length, device=self.device).remainder(facts.vocab_size).view(2, length)
        lengths = (length, length - 1)
        try:
            expected = self._model(input_ids=prompts).logits.float().log_softmax(-1)
            forward.cache.reserve(2, length, 0, 0)
            forward.prefill([row[: end - 1].tolist() for row, end in zip(prompts, lengths, strict=True)], ([0], [1]))
            last = torch.tensor(lengths, device=self.device) - 1
            rows = torch.arange(2, device=self.device)
            found = forward.decode(prompts[rows, last], last, length).float().log_softmax(-1)
            difference = (found - expected[rows, last]).abs().mean().item()
        except Exception as error:
            return one_line(error)
        finally:
            forward.cache.release()
        # In nats, averaged over the vocabulary: bounds of rounding errors, in float32 and in half precision.
        # ``not <`` rather than ``>=``, so that NaN is refused, too.
        if not difference < (1e-3 if self._model.dtype == torch.float32 else 0.1):
            return f"log-probs that differ by {difference:.3g} from a plain forward pass"
        return ""


def check_reach(model_path: str, facts: ModelFacts) -> None:
    """Refuse a model with layers that do not see the whole context.

    Raises:
        ModelError: it has a sliding window shorter than the context, or layers without attention.
    """
    text = facts.config.get_text_config()
    # If the configuration does not list the layers, any of them may have a window.
    kinds = set(getattr(text, "layer_types", None) or ["full_attention", "sliding_attention"])
    window = getattr(text, "sliding_window", None)
    if "sliding_attention" in kinds and window and window < facts.max_length:
        raise _unsupported(
            model_path, f"a sliding window of {window} tokens (generation.max_model_len may be lowered to it)"
        )
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise _unsupported(model_path, f"layers of kind {', '.join(sorted(unknown))}")


def _unsupported(model_path: str, got: str) -> ModelError:
    return ModelError(
        f"expected a model with standard causal attention at {model_path}, got {got}; use the vllm engine for it"
    )


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ModelError("expected a CUDA device (generation.device), got none; set generation.device to auto or cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


@dataclass(slots=True)
class RowSampler:
    """Draws one token per row from logits, for all rows at once.

    Sampling parameters of n rows are columns [n, 1], or None if no row uses the parameter. ``seeds`` and ``drawn`` are
    [n]. A row's random numbers depend on its seed and the number of its draws, never on other rows.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    seeds: npt.NDArray[np.uint64]
    drawn: npt.NDArray[np.uint64]

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], drawn: Sequence[int], device: torch.device
    ) -> "RowSampler":
        """A sampler for rows with these parameters, seeds (any integers) and numbers of draws so far."""
        greedy = [row.temperature < GREEDY_BELOW for row in params]
        divisors = [1.0 if is_greedy else row.temperature for row, is_greedy in zip(params, greedy, strict=True)]

        def column(values: Sequence[float | bool], wanted: bool) -> torch.Tensor | None:
            return torch.tensor(values, device=device).unsqueeze(1) if wanted else None

        return cls(
            temperature=column(divisors, any(value != 1.0 for value in divisors)),
            greedy=column(greedy, any(greedy)),
            min_p=column([row.min_p for row in params], any(row.min_p for row in params)),
            # 0 means no limit: no vocabulary has 2^30 tokens.
            top_k=column([row.top_k or 1 << 30 for row in params], any(row.top_k for row in params)),
            top_p=column(
                [row.top_p if row.top_p < 1.0 else _ALL_MASS for row in params], any(row.top_p < 1.0 for row in params)
            ),
            seeds=np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64),
            drawn=np.array(drawn, dtype=np.uint64),
        )

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row of logits [n, vocabulary].

        Returns:
            Token ids, int64 [n], and their log-probabilities over the whole vocabulary in nats, float32 [n].
        """
        scaled = logits.float() if self.temperature is None else logits.float() / self.temperature
        whole = _Mass.of(scaled)
        restricted = self._restrict(scaled)
        mass = whole if restricted is scaled else _Mass.of(restricted)
        points = torch.from_numpy(uniforms(self.seeds, self.drawn)).to(logits.device).unsqueeze(1)
        self.drawn += np.uint64(1)
        choice = mass.token_at(points)
        if self.greedy is not None:
            choice = torch.where(self.greedy, scaled.argmax(dim=-1, keepdim=True), choice)
        return choice.squeeze(1), (scaled.gather(1, choice) - whole.log_total).float().squeeze(1)

    def _restrict(self, scores: torch.Tensor) -> torch.Tensor:
        """Scaled logits [n, vocabulary], minus infinity for tokens that min-p, top-k or top-p exclude, in that order.

        Min-p keeps a token if it is at least min_p times as likely as the likeliest one (arXiv 2407.01082). Top-p keeps
        a token if the probabilities of all more likely tokens, after min-p and top-k, sum to less than p. So the
        likeliest token always stays, as in vLLM.
        """
        if self.min_p is not None:
            floor = scores.amax(dim=-1, keepdim=True) + self.min_p.log()  # log 0 = -inf: no floor
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if self.top_k is None and self.top_p is None:
            return scores
        ordered, tokens = scores.sort(dim=-1, descending=True)
        if self.top_k is not None:
            ranks = torch.arange(ordered.shape[1], device=ordered.device)
            ordered = ordered.masked_fill(ranks >= self.top_k, -torch.inf)
        if self.top_p is not None:
            probabilities = ordered.softmax(dim=-1)
            # Sum of the probabilities of all more likely tokens: 0 for the first, which therefore always stays.
            mass_before = probabilities.cumsum(dim=-1) - probabilities
            ordered = ordered.masked_fill(mass_before >= self.top_p, -torch.inf)
        return torch.empty_like(scores).scatter_(1, tokens, ordered)


@dataclass(slots=True)
class _Mass:
    """Probabilities of n rows, up to a factor of each row.

    ``weights``: float32 [n, blocks, tokens of a block]. ``sums``: of all blocks up to each, float64 [n, blocks].
    ``log_total``: logarithm of the sum of all exponentiated scores, float64 [n, 1].
    """

    weights: torch.Tensor
    sums: torch.Tensor
    log_total: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor) -> "_Mass":
        """The probabilities that are proportional to the exponentiated scores [n, vocabulary]."""
        largest = scores.amax(dim=-1, keepdim=True)
        weights = (scores - largest).exp_()
        # float32 would lose the probabilities of rare tokens in a sum near 1.
        if weights.shape[1] <= _FEW_TOKENS:
            sums = weights.cumsum(dim=-1, dtype=torch.float64)
            weights = weights.unsqueeze(2)
        else:
            weights = functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
            sums = weights.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        return cls(weights, sums, largest + sums[:, -1:].log())

    def token_at(self, points: torch.Tensor) -> torch.Tensor:
        """The first token of each row at which the cumulative probability exceeds the row's point in [0, 1); [n, 1]."""
        target = points * self.sums[:, -1:]
        block = torch.searchsorted(self.sums, target, right=True)
        size = self.weights.shape[2]
        if size == 1:
            return block
        before = functional.pad(self.sums, (1, 0)).gather(1, block)
        inside = self.weights.gather(1, block.unsqueeze(2).expand(-1, -1, size)).squeeze(1)
        reached = inside.cumsum(dim=-1, dtype=torch.float64)
        # A block's sum in float32 may be larger than that of its tokens; a point between is the last possible token's.
        last = torch.searchsorted(reached, reached[:, -1:].contiguous())
        return block * size + torch.minimum(torch.searchsorted(reached, target - before, right=True), last)


def uniforms(seeds: npt.NDArray[np.uint64], drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Number ``drawn`` of each seed's random stream, in [0, 1 - 2^-48], float64 [n].

    The generator is counter-based: number k of seed s is mix(mix(s * g) + (k + 1) * g), with splitmix64's finaliser and
    its increment g (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195).
    """
    # Products are modulo 2^64.
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds * _WEYL) + (drawn + np.uint64(1)) * _WEYL)
    # u = (upper 48 bits) / 2^48: float64 holds that exactly, and it never rounds up to 1.
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
