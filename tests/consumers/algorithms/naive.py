"""Every algorithm of the shelf once more, in plain loops over tokens, each from the formula that its source prints.

Nothing of the product is used here but the settings' numbers. Scalars are 0-d tensors, so that autograd gives the
gradient, and ``.detach()`` stands where the source stops one. The whole loss is returned, averages included.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST = 6
"""L_max of the tiny batches."""


@dataclass(frozen=True)
class Case:
    """Two groups of three sequences, ragged, with gaps in the mask; float64. ``pi``, ``value`` carry the gradient."""

    pi: Tensor
    mu: Tensor
    start: Tensor
    reference: Tensor
    teacher: Tensor
    value: Tensor
    start_value: Tensor
    mask: Tensor
    rewards: tuple[tuple[float, ...], ...] = ((1.0, 0.0, 0.25), (0.5, 2.0, -1.0))

    @property
    def groups(self) -> list[list[int]]:
        return [[0, 1, 2], [3, 4, 5]]

    @property
    def flat_rewards(self) -> list[float]:
        return [reward for group in self.rewards for reward in group]

    def tokens(self, row: int) -> list[int]:
        return [t for t in range(self.mask.shape[1]) if self.mask[row, t] > 0]

    @property
    def count(self) -> int:
        return sum(len(self.tokens(row)) for row in range(len(self.mask)))


def make_case(seed: int = 0, spread: float = 0.4) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(6, LONGEST, generator=generator, dtype=torch.float64)

    pi = -2.5 * torch.rand(6, LONGEST, generator=generator, dtype=torch.float64) - 0.05
    mask = torch.ones(6, LONGEST, dtype=torch.float64)
    for row, length in enumerate((6, 3, 5, 1, 6, 4)):
        mask[row, length:] = 0.0
    mask[0, 2] = mask[4, 0] = mask[4, 3] = 0.0  # what an environment wrote
    return Case(
        pi=pi.requires_grad_(),
        mu=pi.detach() - noise(spread),
        start=pi.detach() - noise(spread / 2),
        reference=pi.detach() - noise(0.5),
        teacher=pi.detach() - noise(0.7),
        value=noise(0.6).requires_grad_(),
        start_value=noise(0.6),
        mask=mask,
    )


# Advantages.


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def group_relative(case: Case, *, scale: bool) -> list[float]:
    """GRPO, arXiv 2402.03300, section 4.1.2: (r_i - mean(r)) / std(r); Dr. GRPO, arXiv 2503.20783, drops the std.

    The sample deviation plus 1e-4, as TRL has it.
    """
    found = []
    for rewards in case.rewards:
        mean = _mean(list(rewards))
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        found += [(r - mean) / (std + 1e-4) if scale else r - mean for r in rewards]
    return found


def leave_one_out(case: Case) -> list[float]:
    """RLOO, arXiv 2402.14740, equation 8: r_i - 1/(k-1) sum of r_j, j != i."""
    found = []
    for rewards in case.rewards:
        for i, reward in enumerate(rewards):
            found.append(reward - _mean([other for j, other in enumerate(rewards) if j != i]))
    return found


def overlong(length: int, longest: int, cache: int) -> float:
    """DAPO, arXiv 2503.14476, equation 13, times 1."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def discounted(case: Case, row: int, kl_coef: float, gamma: float) -> dict[int, float]:
    """REINFORCE++, arXiv 2501.03262, equations 5 and 6: sum of gamma^(k - t) r_k, r_k = -beta KL_k + 1[k = T] R."""
    tokens, found = case.tokens(row), {}
    for place, t in enumerate(tokens):
        total = 0.0
        for steps, k in enumerate(tokens[place:]):
            reward = -kl_coef * (case.start[row, k] - case.reference[row, k]).item()
            if k == tokens[-1]:
                reward += case.flat_rewards[row]
            total += gamma**steps * reward
        found[t] = total
    return found


def gae(case: Case, row: int, gamma: float, lam: float) -> tuple[dict[int, float], dict[int, float]]:
    """arXiv 1506.02438, equation 16: A_t = sum of (gamma lam)^l delta_{t+l}; the return is A_t + V_t."""
    tokens = case.tokens(row)
    values = [case.start_value[row, t].item() for t in tokens] + [0.0]
    rewards = [0.0] * (len(tokens) - 1) + [case.flat_rewards[row]]
    deltas = [rewards[k] + gamma * values[k + 1] - values[k] for k in range(len(tokens))]
    advantages = {
        t: sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(tokens))) for k, t in enumerate(tokens)
    }
    return advantages, {t: advantages[t] + values[k] for k, t in enumerate(tokens)}


def whiten(rows: list[dict[int, float]]) -> list[dict[int, float]]:
    """Over all tokens of the batch; variance with n - 1, as verl's ``masked_whiten``."""
    everything = [value for row in rows for value in row.values()]
    mean = _mean(everything)
    variance = sum((value - mean) ** 2 for value in everything) / (len(everything) - 1)
    return [{t: (value - mean) / math.sqrt(variance + 1e-8) for t, value in row.items()} for row in rows]


# Token losses.


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO, arXiv 1707.06347, equation 7, as a loss; with two epsilons DAPO's, equation 8."""
    bounded = torch.clamp(ratio, 1 - low, 1 + high)
    return -torch.minimum(ratio * advantage, bounded * advantage)


def k3(case: Case, row: int, t: int) -> Tensor:
    """GRPO, equation 4: ref / pi - log(ref / pi) - 1."""
    gap = case.reference[row, t] - case.pi[row, t]
    return torch.exp(gap) - gap - 1


def policy_loss(
    case: Case,
    advantages: list[dict[int, float]],
    average: str,
    token_loss: "TokenLoss",
    extra: "TokenLoss | None" = None,
) -> Tensor:
    """The average of a token's loss over the batch. "sequence": GRPO; "token": DAPO; "constant": Dr. GRPO."""
    total = torch.zeros((), dtype=torch.float64)
    rows = range(len(case.mask))
    for row in rows:
        own = torch.zeros((), dtype=torch.float64)
        for t in case.tokens(row):
            own = own + token_loss(case, row, t, advantages[row][t])
            if extra is not None:
                own = own + extra(case, row, t, 0.0)
        total = total + (own / len(case.tokens(row)) if average == "sequence" else own)
    return total / {"sequence": len(rows), "token": case.count, "constant": len(rows) * LONGEST}[average]


class TokenLoss:
    """(case, row, t, advantage) -> a token's loss."""

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        raise NotImplementedError


def at_tokens(case: Case, numbers: list[float]) -> list[dict[int, float]]:
    return [dict.fromkeys(case.tokens(row), number) for row, number in enumerate(numbers)]


@dataclass(frozen=True)
class Clip(TokenLoss):
    low: float
    high: float
    cap: float | None = None

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        ratio = torch.exp(case.pi[row, t] - case.mu[row, t])
        if self.cap is not None:  # dual clip, arXiv 1912.09729, equation 5
            ratio = torch.clamp(ratio, max=self.cap)
        return clipped(ratio, advantage, self.low, self.high)


@dataclass(frozen=True)
class Sequence(TokenLoss):
    """GSPO, arXiv 2507.18071, equations 5 and 7."""

    low: float
    high: float

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        tokens = case.tokens(row)
        mean = sum(case.pi[row, k] - case.mu[row, k] for k in tokens) / len(tokens)
        return clipped(torch.exp(torch.as_tensor(mean)), advantage, self.low, self.high)


@dataclass(frozen=True)
class Cispo(TokenLoss):
    """MiniMax-M1, arXiv 2506.13585, equations 4 and 5: sg(clip(r)) A log pi, without a lower bound."""

    high: float

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        ratio = torch.exp(case.pi[row, t] - case.mu[row, t])
        return -torch.clamp(ratio, max=1 + self.high).detach() * advantage * case.pi[row, t]


@dataclass(frozen=True)
class Dppo(TokenLoss):
    """prime-rl's default loss: masked by the difference of probabilities, and (log w)^2."""

    low: float
    high: float
    tau: float

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        log_w = case.pi[row, t] - case.mu[row, t]
        moved = math.exp(case.pi[row, t].item()) - math.exp(case.mu[row, t].item())
        is_dropped = (advantage > 0 and moved > self.high) or (advantage < 0 and moved < -self.low)
        surrogate = torch.exp(log_w) * (0.0 if is_dropped else advantage)
        return -surrogate + self.tau * log_w**2


@dataclass(frozen=True)
class Weighted(TokenLoss):
    """Decoupled PPO (arXiv 2505.24298, equation 5): sg(pi0 / mu), treated by a rule, times PPO's loss of pi / pi0."""

    rule: str
    cap: float
    floor: float = 0.0
    low: float = 0.2
    high: float = 0.28

    def weight(self, case: Case, row: int, t: int) -> float:
        token = math.exp((case.start[row, t] - case.mu[row, t]).item())
        sequence = math.exp(sum((case.start[row, k] - case.mu[row, k]).item() for k in case.tokens(row)))
        value = sequence if self.rule.startswith("sequence") else token
        if self.rule.endswith("truncate"):
            return min(max(value, self.floor), self.cap)
        return value if self.floor <= value <= self.cap else 0.0

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        ratio = torch.exp(case.pi[row, t] - case.start[row, t])
        return self.weight(case, row, t) * clipped(ratio, advantage, self.low, self.high)


@dataclass(frozen=True)
class Reinforce(TokenLoss):
    """-w A log pi, w = sg(min(pi / mu, C)), or 1 without a cap: PipelineRL, arXiv 2509.19128, equation 5."""

    cap: float | None

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        weight = 1.0 if self.cap is None else min(math.exp((case.pi[row, t] - case.mu[row, t]).item()), self.cap)
        return -weight * advantage * case.pi[row, t]


@dataclass(frozen=True)
class Divergence(TokenLoss):
    """beta times an estimate of the KL, plain or as w k with w = pi / mu (DeepSeek-V3.2, arXiv 2512.02556)."""

    kind: str
    beta: float
    weighted: bool

    def __call__(self, case: Case, row: int, t: int, advantage: float) -> Tensor:
        log_ratio = case.pi[row, t] - case.reference[row, t]
        found = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": k3(case, row, t)}[self.kind]
        if self.weighted:
            weight = torch.exp(case.pi[row, t] - case.mu[row, t])
            found = (weight.detach() if self.kind == "k2" else weight) * found
        return self.beta * found


# Preferences, imitation, distillation, the critic.


def _margin(case: Case, group: list[int], rewards: tuple[float, ...]) -> Tensor:
    best, worst = group[rewards.index(max(rewards))], group[rewards.index(min(rewards))]
    scores = [
        sum((case.pi[row, t] - case.reference[row, t] for t in case.tokens(row)), torch.zeros((), dtype=torch.float64))
        for row in (best, worst)
    ]
    return scores[0] - scores[1]


def dpo(case: Case, beta: float) -> Tensor:
    """arXiv 2305.18290, equation 7. The mean over pairs."""
    losses = []
    for group, rewards in zip(case.groups, case.rewards, strict=True):
        logit = beta * _margin(case, group, rewards)
        losses.append(torch.log1p(torch.exp(-logit)))
    return torch.stack(losses).mean()


def ipo(case: Case, beta: float) -> Tensor:
    """arXiv 2310.12036, equation 17: (h - 1 / (2 tau))^2. The mean over pairs."""
    margins = [_margin(case, group, rewards) for group, rewards in zip(case.groups, case.rewards, strict=True)]
    return torch.stack([(margin - 1 / (2 * beta)) ** 2 for margin in margins]).mean()


def imitation(case: Case) -> Tensor:
    """RAFT, arXiv 2304.06767: the negative log-likelihood of each group's best, a token."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group, rewards in zip(case.groups, case.rewards, strict=True):
        best = group[rewards.index(max(rewards))]
        for t in case.tokens(best):
            total, count = total - case.pi[best, t], count + 1
    return total / count


def teacher_credit(case: Case) -> list[dict[int, float]]:
    """The negative reverse KL of each token: log teacher - log pi at the step's start."""
    return [
        {t: (case.teacher[row, t] - case.start[row, t]).item() for t in case.tokens(row)}
        for row in range(len(case.mask))
    ]


def critic_loss(case: Case, gamma: float, lam: float, clip: float) -> Tensor:
    """PPO's value loss with clipping (as in OpenAI's baselines): a mean over tokens of max(...) / 2."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(case.mask)):
        _, returns = gae(case, row, gamma, lam)
        for t in case.tokens(row):
            value, before = case.value[row, t], case.start_value[row, t]
            near = before + torch.clamp(value - before, -clip, clip)
            total = total + torch.maximum((value - returns[t]) ** 2, (near - returns[t]) ** 2) / 2
    return total / case.count
