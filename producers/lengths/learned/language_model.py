"""A language model that predicts completion lengths from the prompt's text: fine-tuning, prediction, saving, loading.

It is any Hugging Face model, encoder or causal, with a head over its pooled last hidden state. The head gives two
numbers: a median m and, through softplus, a distance above it, so that the two quantiles never cross. They are
standardised by the level of the prompt's data set and a scale, which both belong to the model:

    log(length) = level + scale × prediction

A forward pass takes milliseconds or more, and each prompt is predicted when it is sent and when it comes back. So the
scores of texts are cached.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import xxhash
from cachetools import FIFOCache
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as library_logging

from streamrl.producers.lengths.learned.model_store import Manifest, ModelStore
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.schemas.errors import MalformedFrame, ModelError
from streamrl.schemas.trajectories import Prompt

library_logging.disable_progress_bar()

KIND: Literal["language"] = "language"
HEAD = "head.safetensors"
MAX_TOKENS = 1024
"""Most tokens read of a prompt; of a longer one half are from its start and half from its end."""
POOL = 16
"""Batches whose texts are sorted by length together, to reduce padding."""
WARM_UP = 0.05
"""Share of the fine-tuning over which the learning rate rises to its peak."""
MAX_KEPT = 65_536
"""Prompts whose scores are cached, in about 10 MB: more than are in flight at any time."""
Levels = Mapping[str, tuple[float, int]]
Scored = tuple[float, float]


class Regressor(Protocol):
    """Predicts standardised length quantiles of texts."""

    def score(self, texts: Sequence[str]) -> list[tuple[float, float]]:
        """Median and upper quantile of each text, standardised."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A regressor with its version. ``scale``: multiplies the regressor's numbers to give log(length) - level."""

    regressor: Regressor
    scale: float
    version: int
    policy_version: int
    observations: int
    _scores: FIFOCache[int, Scored] = field(default_factory=lambda: FIFOCache(MAX_KEPT))

    @property
    def name(self) -> str:
        """Name of the model in estimates."""
        return f"language_model/v{self.version}"

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper quantile of log(length) minus the level of the data set, by the prompt's text."""
        key = xxhash.xxh3_64_intdigest(prompt.text.encode("utf-8", "replace"))
        scores = self._scores.get(key)
        if scores is None:
            ((median, upper),) = self.regressor.score([prompt.text])
            scores = self._scores[key] = (median * self.scale, upper * self.scale)
        return scores


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Texts with the standardised lengths of their completions.

    ``targets``: by text, the completions' (log(length) - level of the data set) / ``scale``.

    ``levels``: by data set, the median of log(length) and the number of completions.
    """

    texts: tuple[str, ...]
    targets: tuple[tuple[float, ...], ...]
    levels: Levels
    scale: float


def make_training_set(completions: Sequence[ObservedCompletion], scale: float | None = None) -> TrainingSet:
    """A training set with completions of the same text grouped; the scale is computed unless one is given."""
    by_dataset: dict[str, list[float]] = {}
    by_text: dict[tuple[str, str], list[float]] = {}
    for completion in completions:
        dataset, logarithm = completion.prompt.dataset, math.log(max(1, completion.length))
        by_dataset.setdefault(dataset, []).append(logarithm)
        by_text.setdefault((dataset, completion.prompt.text), []).append(logarithm)
    levels = {dataset: (statistics.median(values), len(values)) for dataset, values in by_dataset.items()}
    # over: log(length) - level. The head learns it divided by its standard deviation.
    over = {key: [value - levels[key[0]][0] for value in values] for key, values in by_text.items()}
    if scale is None:
        # At least 0.05, so that nearly equal lengths are not divided by almost 0.
        scale = max(0.05, statistics.pstdev([value for values in over.values() for value in values] or [1.0]))
    return TrainingSet(
        texts=tuple(text for _, text in over),
        targets=tuple(tuple(value / scale for value in values) for values in over.values()),
        levels=levels,
        scale=scale,
    )


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Fine-tuning ends after ``epochs`` passes or after ``seconds``. ``learning_rate`` None: by the model's size."""

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
        positions = getattr(backbone.config, "max_position_embeddings", None) or MAX_TOKENS
        self._longest = min(MAX_TOKENS, int(positions) - 2)  # less 2, because encoders add a token at either end

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Token ids and mask int64 [B, T] to median and upper quantile float32 [B, 2].

        The head reads mean, maximum and last of the states: a causal model collects information in the last state, an
        encoder in any, and in a long prompt the mean hides what a few tokens contribute.
        """
        states = self.backbone(input_ids=tokens, attention_mask=mask).last_hidden_state.float()  # [B, T, H]
        weights = mask.unsqueeze(-1)  # [B, T, 1]
        mean = (states * weights).sum(1) / weights.sum(1)  # [B, H]
        largest = states.masked_fill(weights == 0, -torch.inf).amax(1)  # [B, H]
        last = states[torch.arange(len(states)), mask.sum(1) - 1]  # [B, H], of the last token that is not padding
        pooled = torch.cat([mean, largest, last], -1)  # [B, 3 H]
        median, above = self.head(pooled).unbind(-1)
        return torch.stack([median, median + functional.softplus(above)], -1)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at least one; the middle of a long text is cut out."""
        half = self._longest // 2
        found = self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"] if texts else []
        return [ids if len(ids) <= self._longest else ids[:half] + ids[-half:] for ids in (x or [0] for x in found)]

    def score(self, texts: Sequence[str], batch_size: int = 64) -> list[Scored]:
        """Median and upper quantile of each text."""
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
        """Write weights and tokenizer as ``from_pretrained`` reads them, and the head next to them."""
        self.backbone.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        save_file(self.head.state_dict(), folder / HEAD)


def open_regressor(folder: Path, seed: int = 0) -> LengthRegressor:
    """The model in a directory, with its saved head, else with a new one.

    Raises:
        ModelError: there is no such model.
    """
    try:
        with _seeded(seed):
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
    examples: TrainingSet,
    upper: float,
    tuning: FineTuning,
    is_stopped: Callable[[], bool] = lambda: False,
) -> float:
    """Fine-tune in place to the median and the ``upper`` quantile; returns the mean loss of the last tenth of steps."""
    ids, generator = regressor.encoded(examples.texts), torch.Generator().manual_seed(tuning.seed)
    total = max(1, math.ceil(tuning.epochs * len(ids) / tuning.batch_size))
    size = sum(parameter.numel() for parameter in regressor.parameters())
    # Larger models need smaller steps: 1e-3 up to 150 thousand parameters, then with the inverse square root of size.
    peak = tuning.learning_rate or min(1e-3, 1e-3 * (1.5e5 / size) ** 0.5)
    optimizer = torch.optim.AdamW(regressor.parameters(), lr=peak, weight_decay=0.01)
    losses: list[float] = []
    started = time.monotonic()
    regressor.train()
    with _seeded(tuning.seed):
        progress = 0.0
        while ids and progress < 1 and not is_stopped():
            for batch in _batches(ids, tuning.batch_size, generator):
                # From 0 to 1 by steps or by time, whichever is further.
                progress = max(len(losses) / total, (time.monotonic() - started) / tuning.seconds)
                if progress >= 1 or is_stopped():
                    break
                # Linear warm-up, times half a cosine that falls to 0 at the end of the passes or of the seconds.
                # With the 0.01 the first step, at progress 0, has a rate above 0.
                for group in optimizer.param_groups:
                    group["lr"] = (
                        peak * min(1.0, progress / WARM_UP + 0.01) * (0.5 + 0.5 * math.cos(math.pi * progress))
                    )
                loss = _loss(regressor(*_padded([ids[i] for i in batch])), [examples.targets[i] for i in batch], upper)
                optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(regressor.parameters(), 1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / max(1, len(tail))


def _loss(predicted: torch.Tensor, targets: Sequence[Sequence[float]], upper: float) -> torch.Tensor:
    """Pinball loss of both quantiles (Koenker and Bassett 1978); every completion counts equally.

    With u = target - prediction, for quantile q: max(q × u, (q - 1) × u). ``predicted`` float32 [B, 2]; ``targets``
    has the completions of each of the B texts, N in all.
    """
    rows = torch.tensor([row for row, values in enumerate(targets) for _ in values])  # [N], each target's text
    # [N, 1] - [N, 2]: each length is compared with both quantiles.
    error = torch.tensor([value for values in targets for value in values]).unsqueeze(-1) - predicted[rows]
    share = torch.tensor([0.5, upper])
    return torch.maximum(share * error, (share - 1) * error).sum(-1).mean()


def _batches(ids: Sequence[Sequence[int]], size: int, generator: torch.Generator) -> list[list[int]]:
    """All texts once in a random order, in batches of similar length."""
    order = torch.randperm(len(ids), generator=generator).tolist()
    pools = [
        sorted(order[at : at + size * POOL], key=lambda i: len(ids[i])) for at in range(0, len(order), size * POOL)
    ]
    batches = [pool[at : at + size] for pool in pools for at in range(0, len(pool), size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _padded(ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 [B, T], padded on the right with token 0."""
    width = max(map(len, ids))
    tokens = torch.tensor([[*row, *([0] * (width - len(row)))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    return tokens, mask


@contextmanager
def _seeded(seed: int) -> Any:
    """Use random numbers of a seed inside the context, and restore the generator afterwards."""
    # devices=[]: the model is on the CPU, so GPU generators need not be saved and restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def save(regressor: LengthRegressor, manifest: Manifest, folder: Path) -> Path:
    """Save a model in the folder, under the manifest's version.

    Raises:
        OSError: it cannot be written.
    """
    return ModelStore(folder, KIND).save(manifest, regressor.save)


def load_newest(folder: Path, newer_than: int = 0) -> tuple[LanguageModel, Levels] | None:
    """The newest usable model of the folder, and the levels that it was fitted with; None if there is none."""
    return ModelStore(folder, KIND).load_newest(load, newer_than)


def load(path: Path, manifest: Manifest) -> tuple[LanguageModel, Levels]:
    """Read one version.

    Raises:
        MalformedFrame: its manifest lacks the scale.
        ModelError: the library cannot load it.
    """
    if "scale" not in manifest.details:
        raise MalformedFrame(f"expected a language model of lengths in {path}, got {manifest.details}; delete it")
    scale = manifest.details["scale"]
    return LanguageModel(
        open_regressor(path), scale, manifest.version, manifest.policy_version, manifest.observations
    ), manifest.levels
