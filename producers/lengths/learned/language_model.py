"""A language model that predicts completion lengths from the prompt's text: fine-tuning, prediction, saving, loading.

Any Hugging Face model can be used, encoder or causal. A head reads its pooled last hidden states and gives the median
and the distance of the upper quantile above it. Softplus keeps this distance positive, so that the quantiles never
cross. Both quantiles are standardised by the level of the prompt's data set, which is its median log(length), and by a
scale. Levels and scale are saved with the model:

    log(length) = level + scale × prediction

A forward pass takes milliseconds or more, and a prompt is predicted twice: when it is sent and when its completions
come back. So the scores are cached by text.
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
"""Most tokens of a prompt that the model reads. In a longer prompt, half are at its start and half at its end."""
POOL = 16
"""Number of batches whose texts are sorted by length together, to reduce padding."""
WARM_UP = 0.05
"""Share of the fine-tuning over which the learning rate rises to its peak."""
MAX_KEPT = 65_536
"""Prompts whose scores are cached, in about 10 MB. At any time, fewer prompts are in flight."""
Levels = Mapping[str, tuple[float, int]]
Scored = tuple[float, float]


class Regressor(Protocol):
    """Predicts standardised length quantiles of texts."""

    def score(self, texts: Sequence[str]) -> list[tuple[float, float]]:
        """Median and upper quantile of each text, standardised."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A regressor with its version. ``scale`` converts its standardised numbers to log(length) - level."""

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
        """Median and upper quantile of log(length) - level, predicted from the prompt's text."""
        key = xxhash.xxh3_64_intdigest(prompt.text.encode("utf-8", "replace"))
        scores = self._scores.get(key)
        if scores is None:
            ((median, upper),) = self.regressor.score([prompt.text])
            scores = self._scores[key] = (median * self.scale, upper * self.scale)
        return scores


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Texts with the standardised lengths of their completions.

    ``targets``: for each text, the value (log(length) - level) / ``scale`` of each of its completions.

    ``levels``: for each data set, the median of log(length) and the number of completions.
    """

    texts: tuple[str, ...]
    targets: tuple[tuple[float, ...], ...]
    levels: Levels
    scale: float


def make_training_set(completions: Sequence[ObservedCompletion], scale: float | None = None) -> TrainingSet:
    """Group completions by text, and standardise their lengths. The scale is computed unless one is given."""
    by_dataset: dict[str, list[float]] = {}
    by_text: dict[tuple[str, str], list[float]] = {}
    for completion in completions:
        dataset, logarithm = completion.prompt.dataset, math.log(max(1, completion.length))
        by_dataset.setdefault(dataset, []).append(logarithm)
        by_text.setdefault((dataset, completion.prompt.text), []).append(logarithm)
    levels = {dataset: (statistics.median(values), len(values)) for dataset, values in by_dataset.items()}
    # deviations: log(length) - level. The head learns them divided by their standard deviation.
    deviations = {key: [value - levels[key[0]][0] for value in values] for key, values in by_text.items()}
    if scale is None:
        # At least 0.05, so that nearly equal lengths are not divided by almost 0.
        scale = max(0.05, statistics.pstdev([value for values in deviations.values() for value in values] or [1.0]))
    return TrainingSet(
        texts=tuple(text for _, text in deviations),
        targets=tuple(tuple(value / scale for value in values) for values in deviations.values()),
        levels=levels,
        scale=scale,
    )


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Fine-tuning ends after ``epochs`` passes or ``seconds``. ``learning_rate`` None: set by the model's size."""

    epochs: float = 4.0
    seconds: float = math.inf
    batch_size: int = 16
    learning_rate: float | None = None
    seed: int = 0


class LengthRegressor(torch.nn.Module):
    """Predicts median and upper quantile of a prompt's standardised log(length) from its text."""

    def __init__(self, backbone: Any, tokenizer: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.head = torch.nn.Linear(3 * backbone.config.hidden_size, 2)
        torch.nn.init.normal_(self.head.weight, std=0.02)
        torch.nn.init.zeros_(self.head.bias)
        positions = getattr(backbone.config, "max_position_embeddings", None) or MAX_TOKENS
        self._longest = min(MAX_TOKENS, int(positions) - 2)  # minus 2, because encoders add a token at each end

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map token ids and mask, int64 [B, T], to median and upper quantile, float32 [B, 2].

        The head reads the mean, the maximum and the last of the states. A causal model collects information in the last
        state, an encoder in any state. In a long prompt, the mean hides the contribution of a few tokens.
        """
        states = self.backbone(input_ids=tokens, attention_mask=mask).last_hidden_state.float()  # [B, T, H]
        weights = mask.unsqueeze(-1)  # [B, T, 1]
        mean = (states * weights).sum(1) / weights.sum(1)  # [B, H]
        largest = states.masked_fill(weights == 0, -torch.inf).amax(1)  # [B, H]
        last = states[torch.arange(len(states)), mask.sum(1) - 1]  # [B, H], the last token that is not padding
        pooled = torch.cat([mean, largest, last], -1)  # [B, 3 H]
        median, above = self.head(pooled).unbind(-1)
        return torch.stack([median, median + functional.softplus(above)], -1)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at least one per text. The middle of a long text is left out."""
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
        """Write weights and tokenizer in the format of ``from_pretrained``, and the head next to them."""
        self.backbone.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        save_file(self.head.state_dict(), folder / HEAD)


def open_regressor(folder: Path, seed: int = 0) -> LengthRegressor:
    """Load the model in a directory, with its saved head if there is one, otherwise with a new head.

    Raises:
        ModelError: the directory has no model with a tokenizer, or the library cannot load it.
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
    # Larger models need a lower rate: 1e-3 up to 150 thousand parameters, then proportional to 1 / sqrt(size).
    peak = tuning.learning_rate or min(1e-3, 1e-3 * (1.5e5 / size) ** 0.5)
    optimizer = torch.optim.AdamW(regressor.parameters(), lr=peak, weight_decay=0.01)
    losses: list[float] = []
    started = time.monotonic()
    regressor.train()
    with _seeded(tuning.seed):
        progress = 0.0
        while ids and progress < 1 and not is_stopped():
            for batch in _batches(ids, tuning.batch_size, generator):
                # From 0 to 1: the larger of the share of steps and the share of seconds.
                progress = max(len(losses) / total, (time.monotonic() - started) / tuning.seconds)
                if progress >= 1 or is_stopped():
                    break
                # The rate is a linear warm-up times a half cosine, which falls to 0 at progress 1.
                # The 0.01 gives the first step, at progress 0, a rate above 0.
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

    With u = target - prediction, for quantile q: max(q × u, (q - 1) × u). ``predicted``: float32 [B, 2];
    ``targets``: for each of the B texts, the values of its completions, N in total.
    """
    rows = torch.tensor([row for row, values in enumerate(targets) for _ in values])  # [N], the text of each target
    # [N, 1] - [N, 2]: each length is compared with both quantiles.
    error = torch.tensor([value for values in targets for value in values]).unsqueeze(-1) - predicted[rows]
    quantiles = torch.tensor([0.5, upper])
    return torch.maximum(quantiles * error, (quantiles - 1) * error).sum(-1).mean()


def _batches(ids: Sequence[Sequence[int]], size: int, generator: torch.Generator) -> list[list[int]]:
    """Batches of texts of similar length, in random order. Each text occurs once."""
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
    """Seed torch's random numbers inside the context, and restore the generator's state afterwards."""
    # devices=[]: the model is on the CPU, so GPU generators need not be saved and restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def save(regressor: LengthRegressor, manifest: Manifest, folder: Path) -> Path:
    """Save a model in the folder, under the manifest's version.

    Raises:
        OSError: the model cannot be written.
    """
    return ModelStore(folder, KIND).save(manifest, regressor.save)


def load_newest(folder: Path, newer_than: int = 0) -> tuple[LanguageModel, Levels] | None:
    """The newest usable model above version ``newer_than``, and the levels it was fitted with; None: there is none."""
    return ModelStore(folder, KIND).load_newest(load, newer_than)


def load(path: Path, manifest: Manifest) -> tuple[LanguageModel, Levels]:
    """Load one version of a model.

    Raises:
        MalformedFrame: the manifest lacks the scale.
        ModelError: the library cannot load the model.
    """
    if "scale" not in manifest.details:
        raise MalformedFrame(f"expected a length model with its scale in {path}, got {manifest.details}; delete it")
    scale = manifest.details["scale"]
    return LanguageModel(
        open_regressor(path), scale, manifest.version, manifest.policy_version, manifest.observations
    ), manifest.levels
