"""Configurations and published figures of StreamRL (arXiv 2504.15930) and Laminar (arXiv 2510.12633), as data.

Bars and lines were read off the papers' vector figures (about ±1 %). What is left out of the tables, Laminar's 72B and
StreamRL's 10K set, is predicted all the same and has no published figure here; nothing is fitted on it.
"""

from dataclasses import dataclass

from benchmarks.simulation.plant import Lengths
from producers.generation.engines.length_trace import STREAMRL_BINS

LAMINAR_LENGTHS = {
    "7B": Lengths(
        tuple(
            (53 + 544 * number, share)
            for number, share in enumerate(
                (
                    1.66,
                    2.08,
                    0.63,
                    0.52,
                    0.53,
                    0.54,
                    0.60,
                    0.73,
                    0.42,
                    0.62,
                    0.67,
                    1.10,
                    1.16,
                    1.20,
                    1.32,
                    1.31,
                    0.91,
                    0.67,
                    0.42,
                    0.29,
                    0.17,
                    0.15,
                    0.14,
                    0.16,
                    0.13,
                    0.07,
                    0.06,
                    0.04,
                    0.03,
                    0.02,
                )
            )
        ),
        16_384,
        capped=0.007,
    ),
    "32B": Lengths(
        tuple(
            (177 + 539 * number, share)
            for number, share in enumerate(
                (
                    0.28,
                    1.58,
                    2.40,
                    2.68,
                    2.58,
                    2.02,
                    1.65,
                    1.28,
                    1.01,
                    0.74,
                    0.59,
                    0.40,
                    0.32,
                    0.25,
                    0.18,
                    0.14,
                    0.10,
                    0.08,
                    0.06,
                    0.05,
                    0.04,
                    0.02,
                    0.02,
                    0.01,
                    0.01,
                    0.01,
                    0.01,
                    0.01,
                    0.005,
                    0.005,
                )
            )
        ),
        16_384,
        capped=0.002,
    ),
    "72B": Lengths(
        tuple(
            (139 + 405 * number, share)
            for number, share in enumerate((3.84, 9.10, 6.39, 3.15, 1.27, 0.52, 0.21, 0.09, 0.02, 0.003))
        ),
        4_600,
    ),
}
"""Laminar, figure 17: completions of its three models on DAPO-Math-17k."""
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
_GROWTH = (
    "from 5K to 20K, where lengths grow alike for all models, the published step of verl grows 3.4-, 2.4- and 2.7-fold "
    "(7B, 32B, 72B) and that of ColocationRL 2.7-, 3.3- and 2.8-fold: what makes the difference is not published"
)
REASONS = {
    ("7B", 32, "5K"): _GROWTH,
    ("32B", 64, "5K"): _GROWTH,
    ("72B", 128, "5K"): _GROWTH,
    ("7B", 32, "20K"): _GROWTH,
    ("32B", 64, "20K"): _GROWTH,
    ("72B", 128, "20K"): _GROWTH,
    ("7B", 16, ""): (
        "one-step trains on 8 GPUs here and at 32 GPUs, 28.5 and 45.3 thousand tokens/s, and Laminar generates on 8 at "
        "both, 35.0 and 66.9: neither stage tells what holds it back at 16"
    ),
    ("7B", 32, ""): "as at 16 GPUs: the same 8 GPUs train, and the same 8 generate, at very different rates",
}
"""Of configurations (model, GPUs, lengths) whose published figures contradict each other, or lack what would tell."""
