"""Draws one token per row from logits, all rows at once; knows neither models nor requests.

A row's random numbers depend on its seed and on how many it has drawn, never on the other rows.
Invariant: logprobs_are_of_the_distribution_sampled_from (temperature, then top-k, then top-p, renormalised).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from schemas.messages.prompts import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token; its log-probability is then that at temperature 1."""

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_ALL_MASS = 2.0
"""A top-p that no cumulative probability reaches, rounding included."""


def uniforms(seeds: npt.NDArray[np.uint64], drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Number ``drawn`` of each seed's stream, in [0, 1 - 2^-48] (splitmix64; Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds * _WEYL) + (drawn + np.uint64(1)) * _WEYL)
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(slots=True)
class RowSampler:
    """Sampling parameters of n rows as columns of shape (n, 1); ``None`` where no row asks for it."""

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    seeds: npt.NDArray[np.uint64]
    drawn: npt.NDArray[np.uint64]

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], drawn: Sequence[int], device: torch.device
    ) -> "RowSampler":
        """Columns of these rows: parameters, seed (any integer) and numbers drawn so far."""
        greedy = [row.temperature < GREEDY_BELOW for row in params]
        heat = [1.0 if cold else row.temperature for row, cold in zip(params, greedy, strict=True)]

        def column(values: Sequence[float | bool], wanted: bool) -> torch.Tensor | None:
            return torch.tensor(values, device=device).unsqueeze(1) if wanted else None

        return cls(
            temperature=column(heat, any(value != 1.0 for value in heat)),
            greedy=column(greedy, any(greedy)),
            top_k=column([row.top_k or 1 << 30 for row in params], any(row.top_k for row in params)),
            top_p=column(
                [row.top_p if row.top_p < 1.0 else _ALL_MASS for row in params], any(row.top_p < 1.0 for row in params)
            ),
            seeds=np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64),
            drawn=np.array(drawn, dtype=np.uint64),
        )

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row of logits (n, vocabulary).

        Returns:
            Token ids, int64 (n), and their log-probabilities in nats, float32 (n).
        """
        scaled = logits.float() if self.temperature is None else logits.float() / self.temperature
        if self.top_k is not None or self.top_p is not None:
            scaled = self._restrict(scaled)
        logprobs = torch.log_softmax(scaled, dim=-1)
        choice = self._draw(logprobs)
        if self.greedy is not None:
            choice = torch.where(self.greedy, logprobs.argmax(dim=-1, keepdim=True), choice)
        return choice.squeeze(1), logprobs.gather(1, choice).squeeze(1)

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        points = torch.from_numpy(uniforms(self.seeds, self.drawn)).to(logprobs.device).unsqueeze(1)
        self.drawn += np.uint64(1)
        mass = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(mass, points * mass[:, -1:], right=True)

    def _restrict(self, scaled: torch.Tensor) -> torch.Tensor:
        ordered, tokens = scaled.sort(dim=-1, descending=True)
        if self.top_k is not None:
            ranks = torch.arange(ordered.shape[1], device=ordered.device)
            ordered = ordered.masked_fill(ranks >= self.top_k, -torch.inf)
        if self.top_p is not None:
            probabilities = ordered.softmax(dim=-1)
            mass_before = probabilities.cumsum(dim=-1) - probabilities
            ordered = ordered.masked_fill(mass_before >= self.top_p, -torch.inf)
        return torch.empty_like(scaled).scatter_(1, tokens, ordered)
