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
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from streamrl.producers.generation.engines.model_files import (
    ModelFacts,
    one_line,
    read_adapter,
    read_facts,
    read_weights,
)
from streamrl.producers.generation.engines.port import ActiveCompletion, refuse_schema
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError, ModelError
from streamrl.schemas.trajectories import FinishReason, SamplingParams

log = structlog.get_logger()

GREEDY_BELOW = 1e-5
"""Temperatures below this select the most likely token, with its log-probability at temperature 1."""
_ALL_MASS = 2.0
"""A top-p that no cumulative probability reaches, rounding included."""
_WEYL = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, made odd: splitmix64's increment."""
_SMALLEST = 64
"""Fewest positions that are allocated: growing from 1 by doubling would copy six times needlessly."""


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


class SlotModel:
    """A causal language model and its slot cache on one device: prefill, decode, and adoption of weights in place.

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
        self._lowest = torch.finfo(self._model.dtype).min
        self.cache = SlotCache(facts.config.get_text_config().num_hidden_layers)
        self._indices = torch.arange(1, device=self.device)
        check_reach(model_path, facts)
        self._check_attention(model_path, facts)

    def prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        """Compute each prefix once and copy it into its rows of the cache. Room must have been reserved."""
        longest = max(len(prefix) for prefix in prefixes)
        # Right-padded [prompts, longest]. Causal attention hides the padding from all real tokens, so no mask is
        # needed, and the padding's keys and values are not copied into the cache.
        padded = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes], device=self.device)
        prefilled = DynamicCache(config=self._model.config)
        positions = torch.arange(longest, device=self.device).unsqueeze(0)
        self._model(
            input_ids=padded, position_ids=positions, past_key_values=prefilled, use_cache=True, logits_to_keep=1
        )
        for index, (prefix, of_prefix) in enumerate(zip(prefixes, rows, strict=True)):
            self.cache.fill(of_prefix, prefilled, index, len(prefix))

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Run the model on one token per row.

        Args:
            tokens: int64 [n], the token of rows 0..n-1.
            positions: int64 [n], the tokens' positions.
            longest: the largest position plus one.

        Returns:
            Logits [n, vocabulary].
        """
        self.cache.positions.set(positions, longest)
        # Grown by doubling and kept, to avoid an allocation at each step.
        if len(self._indices) < longest:
            self._indices = torch.arange(2 * longest, device=self.device)
        # Added to attention's scores [n, heads, 1, longest]: 0 up to a row's own position, the lowest number after it.
        column = positions.unsqueeze(1)
        hidden = self._indices[:longest] > column
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self.device).masked_fill_(hidden, self._lowest)
        output = self._model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask[:, None, None, :],
            position_ids=column,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

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
    def _check_attention(self, model_path: str, facts: ModelFacts) -> None:
        """Compare decoding of two short prompts' last tokens through slots with a plain forward pass.

        Raises:
            ModelError: the results differ.
        """
        length = min(6, facts.max_length)
        prompts = torch.arange(2 * length, device=self.device).remainder(facts.vocab_size).view(2, length)
        lengths = (length, length - 1)
        try:
            expected = self._model(input_ids=prompts).logits.float().log_softmax(-1)
            self.cache.reserve(2, length, 0, 0)
            self.prefill([row[: end - 1].tolist() for row, end in zip(prompts, lengths, strict=True)], ([0], [1]))
            last = torch.tensor(lengths, device=self.device) - 1
            rows = torch.arange(2, device=self.device)
            found = self.decode(prompts[rows, last], last, length).float().log_softmax(-1)
            difference = (found - expected[rows, last]).abs().mean().item()
        except Exception as error:
            raise _unsupported(model_path, one_line(error)) from error
        finally:
            self.cache.release()
        # In nats, averaged over the vocabulary: bounds of rounding errors, in float32 and in half precision.
        # ``not <`` rather than ``>=``, so that NaN is refused, too.
        if not difference < (1e-3 if self._model.dtype == torch.float32 else 0.1):
            raise _unsupported(model_path, f"log-probs that differ by {difference:.3g} from a plain forward pass")


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


class SlotCache(Cache):  # type: ignore[misc]
    """Key-value cache of a batch whose rows have different lengths: row r holds one completion's tokens from 0 on.

    The model gets it as ``past_key_values`` at every decode step. Rows in use are always the first ones, so attention
    reads no others. Unused memory is zero, never uninitialised: masked positions are multiplied, too, and zero times
    NaN is NaN.
    """

    def __init__(self, num_layers: int) -> None:
        self.positions = WritePositions()
        self._slots = [SlotLayer(self.positions) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """Make room for rows × length. Grows by doubling, and shrinks when a quarter would suffice."""
        room = (_room(rows, self.positions.room[0], 1), _room(length, self.positions.room[1], _SMALLEST))
        if room != self.positions.room:
            self.positions.room = room
            for layer in self._slots:
                layer.resize(used_rows, used_length)

    def fill(self, rows: Sequence[int], prefilled: Cache, index: int, length: int) -> None:
        """Copy row ``index`` of a prefilled cache into rows; ``length``: its real tokens."""
        for layer, source in zip(self._slots, prefilled.layers, strict=True):
            if not isinstance(source, DynamicLayer) or source.keys is None or source.values is None:
                raise TypeError(f"a {type(source).__name__} cache layer")
            layer.fill(rows, source.keys[index, :, :length], source.values[index, :, :length])

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another in all layers."""
        for layer in self._slots:
            layer.move(source, target, length)

    def release(self) -> None:
        """Release all memory."""
        self.positions.room = (0, 0)
        for layer in self._slots:
            layer.keys = layer.values = torch.empty(0)
            layer.is_initialized = False


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, each [rows, heads, capacity, head size]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, positions: "WritePositions") -> None:
        super().__init__()
        self.positions = positions

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the reserved room, with the shapes of the model's own states."""
        rows, capacity = self.positions.room
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row. Returns the keys and values for attention: all rows in use, up to the longest.

        The states are [rows, heads, 1, head size]; the results are views of the cache, [rows, heads, longest, head
        size].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        rows, longest = self.positions.rows, self.positions.longest
        return self.keys[:rows, :, :longest], self.values[:rows, :, :longest]

    def resize(self, rows: int, length: int) -> None:
        """Move to the reserved room, keeping the first rows × length."""
        if not self.is_initialized:
            return
        old_keys, old_values = self.keys, self.values
        self.lazy_initialization(old_keys, old_values)
        self.keys[:rows, :, :length] = old_keys[:rows, :, :length]
        self.values[:rows, :, :length] = old_values[:rows, :, :length]

    def fill(self, rows: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the same keys and values [heads, length, head size] to the start of rows."""
        if not self.is_initialized:
            self.lazy_initialization(keys.unsqueeze(0), values.unsqueeze(0))
        for row in rows:
            self.keys[row, :, : keys.shape[1]] = keys
            self.values[row, :, : values.shape[1]] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another."""
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def _write(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        # One scatter over a flat view [rows * heads * capacity, head size], as each row writes at its own position.
        _, heads, capacity, size = cache.shape
        flat = self.positions.flat(heads, capacity)
        cache.view(-1, size).index_copy_(0, flat, states.reshape(-1, size))


class WritePositions:
    """The positions that the next decode step writes, one for each of n rows; shared by all layers.

    ``rows`` and ``longest``: rows and positions in use. ``room``: allocated rows × positions.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.longest = 0
        self.room = (0, 0)
        self._positions = torch.empty(0)
        self._flat: dict[tuple[int, int], torch.Tensor] = {}

    def set(self, positions: torch.Tensor, longest: int) -> None:
        """Set the positions (n) of the next step's tokens. The largest is ``longest - 1``."""
        self._positions, self.rows, self.longest = positions, len(positions), longest
        self._flat.clear()

    def flat(self, heads: int, capacity: int) -> torch.Tensor:
        """Indices (n × heads) of those positions in a cache flattened to (rows × heads × capacity)."""
        # Position p of head h of row r is at index (r * heads + h) * capacity + p. Layers may differ in their number of
        # heads; layers with the same number share the indices of a step.
        key = (heads, capacity)
        if key not in self._flat:
            first = torch.arange(self.rows * heads, device=self._positions.device) * capacity
            self._flat[key] = first + self._positions.repeat_interleave(heads)
        return self._flat[key]


def _room(needed: int, current: int, smallest: int) -> int:
    """Size to allocate. Doubling bounds the copies per token; shrinking only at a quarter avoids oscillation."""
    if needed > current:
        return max(needed, 2 * current, smallest)
    if current > max(4 * needed, smallest):
        return max(2 * needed, smallest)
    return current


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
        logprobs = torch.log_softmax(scaled, dim=-1)
        choice = self._draw(self._restrict(logprobs))
        if self.greedy is not None:
            choice = torch.where(self.greedy, logprobs.argmax(dim=-1, keepdim=True), choice)
        return choice.squeeze(1), logprobs.gather(1, choice).squeeze(1)

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Draw by the inverse distribution function: the first token at which the cumulative probability exceeds u.

        u is scaled by the total probability, which renormalises a truncated distribution.
        """
        points = torch.from_numpy(uniforms(self.seeds, self.drawn)).to(logprobs.device).unsqueeze(1)
        self.drawn += np.uint64(1)
        # [n, vocabulary]; float32 would lose the probabilities of rare tokens in a sum near 1.
        mass = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(mass, points * mass[:, -1:], right=True)

    def _restrict(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Log-probs [n, vocabulary], minus infinity for tokens that min-p, top-k or top-p exclude, in that order.

        Min-p keeps a token if it is at least min_p times as likely as the likeliest one (arXiv 2407.01082). Top-p keeps
        a token if the probabilities of all more likely tokens, after min-p and top-k, sum to less than p. So the
        likeliest token always stays, as in vLLM.
        """
        if self.min_p is not None:
            floor = logprobs.amax(dim=-1, keepdim=True) + self.min_p.log()  # log 0 = -inf: no floor
            logprobs = logprobs.masked_fill(logprobs < floor, -torch.inf)
        if self.top_k is None and self.top_p is None:
            return logprobs
        ordered, tokens = logprobs.sort(dim=-1, descending=True)
        if self.top_k is not None:
            ranks = torch.arange(ordered.shape[1], device=ordered.device)
            ordered = ordered.masked_fill(ranks >= self.top_k, -torch.inf)
        if self.top_p is not None:
            probabilities = ordered.softmax(dim=-1)
            # Sum of the probabilities of all more likely tokens: 0 for the first, which therefore always stays.
            mass_before = probabilities.cumsum(dim=-1) - probabilities
            ordered = ordered.masked_fill(mass_before >= self.top_p, -torch.inf)
        return torch.empty_like(logprobs).scatter_(1, tokens, ordered)


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
