"""Configurations and published figures of StreamRL (arXiv 2504.15930) and Laminar (arXiv 2510.12633), as data.

Bars and lines were read off the papers' vector figures (about ±1 %). What is left out of the tables, Laminar's 72B and
StreamRL's 10K set, is predicted all the same and has no published figure here; nothing is fitted on it.
"""

from dataclasses import dataclass

from benchmarks.simulation.plant import Lengths
from streamrl.producers.generation.engines.length_trace import STREAMRL_BINS

IDENTITY = ("paper", "figure", "model", "gpus", "lengths", "system")
"""What tells a published figure, and the row that is simulated for it, from all others."""


def _even(first: int, width: int, end: int, shares: tuple[float, ...], capped: float = 0.0) -> Lengths:
    """Bins that are all as wide."""
    return Lengths(tuple((first + width * number, share) for number, share in enumerate(shares)), end, capped)


LAMINAR_LENGTHS = {
    "7B": _even(53, 544, 16_384, (
        1.66, 2.08, 0.63, 0.52, 0.53, 0.54, 0.60, 0.73, 0.42, 0.62, 0.67, 1.10, 1.16, 1.20, 1.32, 1.31, 0.91, 0.67,
        0.42, 0.29, 0.17, 0.15, 0.14, 0.16, 0.13, 0.07, 0.06, 0.04, 0.03, 0.02,
    ), capped=0.007),
    "32B": _even(177, 539, 16_384, (
        0.28, 1.58, 2.40, 2.68, 2.58, 2.02, 1.65, 1.28, 1.01, 0.74, 0.59, 0.40, 0.32, 0.25, 0.18, 0.14, 0.10, 0.08,
        0.06, 0.05, 0.04, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005,
    ), capped=0.002),
    "72B": _even(139, 405, 4_600, (3.84, 9.10, 6.39, 3.15, 1.27, 0.52, 0.21, 0.09, 0.02, 0.003)),
}  # fmt: skip
"""Laminar, figure 17: completions of its three models on DAPO-Math-17k."""
TOOL_LENGTHS = Lengths((
    (50, 0.05), (396, 0.05), (482, 0.15), (651, 0.25), (882, 0.25), (1203, 0.15), (1656, 0.05), (2096, 0.04),
    (4025, 0.009), (11_639, 0.001),
), 16_384)  # fmt: skip
"""Laminar, figure 17: completions of 7B that call tools, between its percentiles; the mean is 1,043."""
SANDBOX_MS = Lengths((
    (1000, 0.10), (7800, 0.15), (10_600, 0.25), (21_000, 0.25), (48_000, 0.15), (145_000, 0.05), (237_000, 0.04),
    (396_000, 0.01),
), 600_000)  # fmt: skip
"""Laminar, figure 2: milliseconds of a call of a sandbox, between its percentiles; the mean is 51 s."""
STREAMRL_LENGTHS = Lengths(STREAMRL_BINS, 19_876)
STREAMRL_PROMPTS = Lengths(
    ((5, 0.05), (33, 0.05), (54, 0.15), (119, 0.25), (245, 0.25), (588, 0.15), (755, 0.10)), 1500
)
"""StreamRL, figure 7, between its percentiles; the mean is 389."""
STREAMRL_FACTORS = {"5K": 0.25, "10K": 0.5, "20K": 1.0}

SYSTEMS = ("verl", "one_step", "stream", "areal", "laminar")


@dataclass(frozen=True)
class LaminarRow:
    """``published``: thousands of tokens a second by system, in the order of ``SYSTEMS``; empty: left out."""

    model: str
    gpus: int
    one_step: tuple[int, int]
    areal: tuple[int, int]
    laminar: tuple[int, int]
    published: tuple[float, ...] = ()

    def split(self, system: str) -> tuple[int, int]:
        """GPUs that train and that generate: Laminar's table 2; stream and one-step have the same."""
        match system:
            case "verl":
                return self.gpus, self.gpus
            case "areal":
                return self.areal
            case "laminar" | "laminar_without_repack" | "streamrl_ranker_repack":
                return self.laminar
        return self.one_step


def _half(gpus: int) -> tuple[int, int]:
    return gpus // 2, gpus // 2


LAMINAR = (
    LaminarRow("7B", 16, (8, 8), _half(16), (8, 8), (28.0, 28.5, 31.2, 29.0, 35.0)),
    LaminarRow("7B", 32, (8, 24), _half(32), (24, 8), (37.3, 45.3, 46.2, 55.1, 66.9)),
    LaminarRow("7B", 64, (16, 48), _half(64), (40, 24), (45.7, 61.3, 62.3, 81.8, 137.5)),
    LaminarRow("7B", 128, (32, 96), _half(128), (80, 48), (46.7, 62.7, 63.3, 115.6, 209.2)),
    LaminarRow("7B", 256, (40, 216), _half(256), (192, 64), (47.5, 63.8, 64.2, 159.3, 260.7)),
    LaminarRow("32B", 32, (16, 16), _half(32), _half(32), (17.8, 15.7, 18.1, 20.6, 21.1)),
    LaminarRow("32B", 64, (32, 32), _half(64), _half(64), (30.2, 27.6, 30.1, 39.6, 40.1)),
    LaminarRow("32B", 128, (48, 80), _half(128), _half(128), (42.6, 53.2, 53.1, 58.3, 69.2)),
    LaminarRow("32B", 256, (64, 192), _half(256), _half(256), (49.9, 63.9, 64.1, 84.6, 122.9)),
    LaminarRow("32B", 512, (80, 432), _half(512), _half(512), (51.0, 63.9, 65.2, 128.8, 230.2)),
    LaminarRow("72B", 64, (32, 32), _half(64), _half(64)),
    LaminarRow("72B", 128, (64, 64), _half(128), _half(128)),
    LaminarRow("72B", 256, (96, 160), _half(256), _half(256)),
    LaminarRow("72B", 512, (192, 320), (320, 192), (320, 192)),
    LaminarRow("72B", 1024, (256, 768), (640, 384), (768, 256)),
)
"""Figure 11 and table 2."""

STREAMRL_SYSTEMS = ("verl", "colocation", "sync", "async")


@dataclass(frozen=True)
class StreamRow:
    """``published``: samples a second, in the order of ``STREAMRL_SYSTEMS``; empty: left out. ``generating``: GPUs."""

    lengths: str
    model: str
    gpus: int
    generating: int
    published: tuple[float, ...] = ()


STREAMRL = (
    StreamRow("5K", "7B", 32, 16, (8.04, 12.99, 16.09, 21.35)),
    StreamRow("5K", "32B", 64, 40, (4.22, 6.08, 6.72, 7.69)),
    StreamRow("5K", "72B", 128, 80, (3.10, 4.18, 5.87, 7.31)),
    StreamRow("10K", "7B", 32, 16),
    StreamRow("10K", "32B", 64, 40),
    StreamRow("10K", "72B", 128, 80),
    StreamRow("20K", "7B", 32, 16, (2.39, 4.80, 5.08, 5.71)),
    StreamRow("20K", "32B", 64, 40, (1.76, 1.86, 2.15, 2.45)),
    StreamRow("20K", "72B", 128, 80, (1.14, 1.52, 1.87, 2.25)),
)
"""Figure 8. GPUs that generate: figure 10 for 32B and 72B; of 7B's nothing is said, half is assumed."""

DISPATCH = {
    "7B": {"ranker": 0.90, "oracle": 0.82},
    "32B": {"ranker": 0.82, "oracle": 0.67},
    "72B": {"ranker": 0.79, "oracle": 0.69},
}
"""StreamRL, figure 9: generation time as a share of random placement's, 20K set."""
LADDER = {"colocation": 1.00, "skewness": 1.08, "sync": 1.23, "async": 1.48}
"""StreamRL, table 3: 72B, 20K, over colocation."""
STALENESS = (0.155, 0.531, 0.292, 0.023)
"""Laminar, figure 10: shares of 0 to 3 steps at the end of a completion, 7B on 64 GPUs, after the first half hour."""
REPACK = {
    "with": {"kv": 0.822, "rate": 68.1, "mean_s": 290, "max_s": 828},
    "without": {"kv": 0.716, "rate": 54.1, "mean_s": 296, "max_s": 826},
}
"""Laminar, table 1 and figure 16: 32B, 64 GPUs train and 64 generate; generated tokens, thousands a second."""
BROADCAST = {
    "32B": {4: 0.42, 8: 0.49, 16: 0.55, 32: 0.61, 64: 0.67, 128: 0.73},
    "72B": {4: 0.94, 8: 1.10, 16: 1.24, 32: 1.38, 64: 1.50, 128: 1.62},
}
"""Laminar, figure 18: seconds until the last of so many machines has new weights."""
STALL_S = {"32B": 0.64, "72B": 1.40}
"""Laminar, section 4: seconds that the trainer waits while it hands a version over."""
WAITS = {
    "32B": {
        32: (0.80, 0.69, 0.56),
        64: (0.87, 0.71, 0.56),
        128: (0.93, 0.71, 0.56),
        256: (0.95, 0.72, 0.56),
        512: (0.97, 0.73, 0.56),
    },
    "72B": {
        32: (1.86, 1.36, 1.29),
        64: (2.02, 1.42, 1.29),
        128: (2.15, 1.47, 1.29),
        256: (2.30, 1.52, 1.29),
        512: (2.44, 1.55, 1.29),
    },
}
"""Laminar, figure 14: by GPUs that generate, seconds that a replica waits for new weights: in a synchronisation of all
GPUs, and with relays in the mean and at best."""
TOOL_CALLING = {
    16: (28.0, 28.5, 31.2, 34.9),
    32: (36.9, 44.9, 45.7, 66.7),
    64: (37.2, 49.9, 50.7, 137.2),
    128: (40.5, 54.4, 54.8, 208.6),
    256: (44.2, 59.2, 59.9, 260.0),
}
"""Laminar, figure 12, thousands of tokens a second of verl, one-step, stream and Laminar: bars that disagree with
caption and text."""
TOOL_SYSTEMS = ("verl", "one_step", "stream", "laminar")
ONE_REPLICA = {"full_s": 115, "waiting": 112, "queued_s": 298, "left": 235, "batch_s": 642, "tail_share": 220 / 642}
"""Laminar, figure 9: 512 completions on a replica of 32B on 4 GPUs. Seconds until the cache is full, most that wait,
seconds until none waits any more and how many are left then, seconds in all, and the share of them with at most 4."""
FAILURE = {"during": 55.2 / 69.8, "after": 69.6 / 69.8, "step": 58.7 / 67.1}
"""Laminar, figure 15: tokens sampled while two of 16 replicas are away and afterwards, over before; and the slowest
step's throughput over that of the others."""
RECALL = {20: 0.85, 10: 0.79, 5: 0.72}
"""StreamRL, table 4, Qwen2.5-3B, the second of three: recall of the longest per cent."""
PROFILE_GPUS = {8: (1.00, 1.00), 16: (0.81, 0.54), 24: (0.74, 0.30), 32: (0.69, 0.19)}
PROFILE_TOKENS = {1024: (1.0, 1.0), 2048: (1.9, 1.57), 4096: (3.75, 2.75), 8192: (8.0, 5.0)}
"""StreamRL, figure 2: time of generation and of training of 7B, over that of 8 GPUs and of 1,024 tokens."""
SPLITS = {
    "32B": {32: (1.00, 0.73), 40: (0.81, 0.73)},
    "72B": {64: (1.00, 0.59), 80: (0.81, 0.83)},
}
"""StreamRL, figure 10: by GPUs that generate, time of generation and of training over that of generation on half of
them. The second split of each is its algorithm 1's."""
GROWING = (
    -0.7, 1.8, -4.3, 4.5, 3.2, 10.1, 9.4, 18.1, 21.9, 29.7, -8.2, 1.6, 9.2, 12.1, 17.0, 21.6, -7.7, -2.1, 7.7, 5.9,
    10.1, 15.7, -4.1,
)  # fmt: skip
"""StreamRL, figure 11: seconds by which generation takes longer than training, 7B, while lengths grow from those of the
10K set to the 20K set's; 8 GPUs more generate after the steps ``ADDED``."""
ADDED = (10, 16, 22)
ACROSS = {"5K": 22.96, "10K": 11.91, "20K": 5.95}
ACROSS_GAIN = {"5K": 1.26, "10K": 1.31, "20K": 1.23}
"""StreamRL, figure 12: samples a second of 7B, 32 H20 that generate and 16 H800 in another place that train; and that
by its cost, over 32 H800 in one place."""
LINK_S = 10.0
"""StreamRL, section 7.3: seconds within which 72B's weights cross the link, at most."""
