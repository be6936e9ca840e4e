"""A fine-tuned language model as a predictor asks it: by prompt, one at a time, each text once.

A forward pass costs milliseconds or more, and a prompt is asked about when it is sent and when it comes back; so what
was said of a text is kept. Knows no library.
"""

import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as library_logging

from schemas.errors import ModelError
from schemas.trajectories import Prompt

# What the language model learns from: a prompt's text and a length that came of it. Knows no library.

Levels = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Example:
    """``length`` in tokens of one completion of a prompt."""

    text: str
    dataset: str
    length: int


@dataclass(frozen=True, slots=True)
class Lesson:
    """``targets``: by text, logarithms of length over the data set's level, divided by ``scale``.

    ``levels``: by data set, the median logarithm and how many completions that rests on.
    """

    texts: tuple[str, ...]
    targets: tuple[tuple[float, ...], ...]
    levels: Levels
    scale: float


def lesson_of(examples: Sequence[Example], levels: Levels | None = None, scale: float | None = None) -> Lesson:
    """Completions of one text together; levels and scale are measured unless those of an earlier lesson are given."""
    by_dataset: dict[str, list[float]] = {}
    by_text: dict[tuple[str, str], list[float]] = {}
    for example in examples:
        logarithm = math.log(max(1, example.length))
        by_dataset.setdefault(example.dataset, []).append(logarithm)
        by_text.setdefault((example.dataset, example.text), []).append(logarithm)
    measured = {dataset: (statistics.median(values), len(values)) for dataset, values in by_dataset.items()}
    levels = {**measured, **(levels or {})}
    over = {key: [value - levels[key[0]][0] for value in values] for key, values in by_text.items()}
    if scale is None:
        scale = max(0.05, statistics.pstdev([value for values in over.values() for value in values] or [1.0]))
    return Lesson(
        texts=tuple(text for _, text in over),
        targets=tuple(tuple(value / scale for value in values) for values in over.values()),
        levels=levels,
        scale=scale,
    )


MAX_KEPT = 65_536


class Regressor(Protocol):
    """Scores texts."""

    def score(self, texts: Sequence[str]) -> list[tuple[float, float]]:
        """Median and upper of each text, standardised."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """``scale``: what the regressor's numbers are multiplied by to be logarithms of length over the level."""

    regressor: Regressor
    scale: float
    version: int
    policy_version: int
    observations: int
    _said: OrderedDict[int, tuple[float, float]] = field(default_factory=OrderedDict)

    @property
    def name(self) -> str:
        """How estimates call it."""
        return f"language_model/v{self.version}"

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper of the logarithm of length over its data set's level, by the prompt's text."""
        key = xxhash.xxh3_64_intdigest(prompt.text.encode("utf-8", "replace"))
        said = self._said.get(key)
        if said is None:
            ((median, upper),) = self.regressor.score([prompt.text])
            said = self._said[key] = (median * self.scale, upper * self.scale)
            if len(self._said) > MAX_KEPT:
                self._said.popitem(last=False)
        return said


# Any Hugging Face model, encoder or causal, with a head over its pooled last hidden state. Imports torch. The head
# gives two numbers, a median and a distance above it, so that quantiles never cross. They are fitted by the pinball
# loss (Koenker and Bassett 1978).

library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

HEAD = "head.safetensors"
MAX_TOKENS = 1024
"""Of a longer prompt the beginning and the end are read."""
POOL = 16
"""Batches that are sorted by length together, so that little is padded."""
WARM_UP = 0.05
Scored = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Effort:
    """So many passes, or so many seconds if those are over first. ``learning_rate`` none: by size."""

    epochs: float = 4.0
    seconds: float = math.inf
    batch_size: int = 16
    learning_rate: float | None = None
    seed: int = 0


class LengthRegressor(torch.nn.Module):
    """Median and upper quantile of a prompt's standardised log length, by its text."""

    def __init__(self, backbone: Any, tokenizer: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.head = torch.nn.Linear(3 * backbone.config.hidden_size, 2)
        torch.nn.init.normal_(self.head.weight, std=0.02)
        torch.nn.init.zeros_(self.head.bias)
        places = getattr(backbone.config, "max_position_embeddings", None) or MAX_TOKENS
        self._longest = min(MAX_TOKENS, int(places) - 2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Token ids and mask int64 [B, T] to median and upper float32 [B, 2].

        Mean, maximum and last of the states are read: a causal model gathers in the last one, an encoder anywhere, and
        what a few tokens say is lost in the mean of a long prompt.
        """
        states = self.backbone(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
        weights = mask.unsqueeze(-1)
        mean = (states * weights).sum(1) / weights.sum(1)
        largest = states.masked_fill(weights == 0, -torch.inf).amax(1)
        last = states[torch.arange(len(states)), mask.sum(1) - 1]
        pooled = torch.cat([mean, largest, last], -1)
        median, above = self.head(pooled).unbind(-1)
        return torch.stack([median, median + functional.softplus(above)], -1)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at least one; the middle of a long one is left out."""
        half = self._longest // 2
        found = self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"] if texts else []
        return [ids if len(ids) <= self._longest else ids[:half] + ids[-half:] for ids in (x or [0] for x in found)]

    def score(self, texts: Sequence[str], batch_size: int = 64) -> list[Scored]:
        """Median and upper of each text."""
        ids = self.encoded(texts)
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        scored: dict[int, Scored] = {}
        self.eval()
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                for index, (median, upper) in zip(
                    chosen, self(*_padded([ids[i] for i in chosen])).tolist(), strict=True
                ):
                    scored[index] = (median, upper)
        return [scored[index] for index in range(len(ids))]

    def save(self, folder: Path) -> None:
        """Write weights and tokenizer as ``from_pretrained`` reads them, and the head beside them."""
        self.backbone.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        save_file(self.head.state_dict(), folder / HEAD)


def open_regressor(folder: Path, seed: int = 0) -> LengthRegressor:
    """A model of a directory, with its head if it has one, else with a new one.

    Raises:
        ModelError: there is no such model.
    """
    try:
        with _drawn(seed):
            backbone = AutoModel.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
            regressor = LengthRegressor(backbone, AutoTokenizer.from_pretrained(folder, local_files_only=True))
        if (folder / HEAD).exists():
            regressor.head.load_state_dict(load_file(folder / HEAD))
    except Exception as error:
        raise ModelError(f"expected a model with its tokenizer in {folder}, got: {error}") from error
    return regressor


def train(
    regressor: LengthRegressor,
    lesson: Lesson,
    upper: float,
    effort: Effort,
    is_stopped: Callable[[], bool] = lambda: False,
) -> float:
    """Fine-tune in place to the median and the ``upper`` quantile; returns the mean loss of the last tenth of steps."""
    ids, generator = regressor.encoded(lesson.texts), torch.Generator().manual_seed(effort.seed)
    total = max(1, math.ceil(effort.epochs * len(ids) / effort.batch_size))
    size = sum(parameter.numel() for parameter in regressor.parameters())
    peak = effort.learning_rate or min(1e-3, 1e-3 * (1.5e5 / size) ** 0.5)
    optimizer = torch.optim.AdamW(regressor.parameters(), lr=peak, weight_decay=0.01)
    losses: list[float] = []
    began = time.monotonic()
    regressor.train()
    with _drawn(effort.seed):
        progress = 0.0
        while ids and progress < 1 and not is_stopped():
            for batch in _batches(ids, effort.batch_size, generator):
                progress = max(len(losses) / total, (time.monotonic() - began) / effort.seconds)
                if progress >= 1 or is_stopped():
                    break
                for group in optimizer.param_groups:
                    group["lr"] = (
                        peak * min(1.0, progress / WARM_UP + 0.01) * (0.5 + 0.5 * math.cos(math.pi * progress))
                    )
                loss = _loss(regressor(*_padded([ids[i] for i in batch])), [lesson.targets[i] for i in batch], upper)
                optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(regressor.parameters(), 1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / max(1, len(tail))


def _loss(predicted: torch.Tensor, targets: Sequence[Sequence[float]], upper: float) -> torch.Tensor:
    """Pinball loss of both quantiles, every completion of a text counted alike."""
    rows = torch.tensor([row for row, values in enumerate(targets) for _ in values])
    error = torch.tensor([value for values in targets for value in values]).unsqueeze(-1) - predicted[rows]
    share = torch.tensor([0.5, upper])
    return torch.maximum(share * error, (share - 1) * error).sum(-1).mean()


def _batches(ids: Sequence[Sequence[int]], size: int, generator: torch.Generator) -> list[list[int]]:
    """All texts once in a random order, but neighbours alike long."""
    order = torch.randperm(len(ids), generator=generator).tolist()
    pools = [
        sorted(order[at : at + size * POOL], key=lambda i: len(ids[i])) for at in range(0, len(order), size * POOL)
    ]
    batches = [pool[at : at + size] for pool in pools for at in range(0, len(pool), size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _padded(ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, ids))
    tokens = torch.tensor([[*row, *([0] * (width - len(row)))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    return tokens, mask


@contextmanager
def _drawn(seed: int) -> Any:
    """Random numbers of a seed inside, those of before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
