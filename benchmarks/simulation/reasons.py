"""Why figures are off, as far as the published ones themselves or the model tell."""

from collections.abc import Mapping
from typing import Any

_GROWTH = (
    "from 5K to 20K, where lengths grow alike for all models, the published step of verl grows 3.4-, 2.4- and "
    "2.7-fold (7B, 32B, 72B) and that of ColocationRL 2.7-, 3.3- and 2.8-fold: no term that is the same for all "
    "models does that"
)
_WHOLE = (
    "by Little's law 68.1 thousand tokens/s with 290 s each are 5,970 completions at once, of 1,870 tokens each "
    "in caches that are 82 % full; of figure 17's lengths one that runs has 2,500 in the mean: what is measured "
    "is not said to be from the first token on, nor to count those whose caches were given up"
)
REASONS = {
    ("streamrl", "8", ""): _GROWTH,
    ("streamrl", "2", "generation"): (
        "published generation is 1.4 times as fast on 4 times the GPUs: its workload, which is not stated, must "
        "leave most of the time to few completions; here 1,024 of equal length are sampled"
    ),
    ("streamrl", "2", "training"): "published training is 5.3 times as fast on 4 times the GPUs; here 4 times at most",
    ("streamrl", "10", ""): (
        "32B trains as fast on 24 GPUs as on 32 in the figure, and 72B 1.4 times as long on 48 as on 64; and GPUs"
        " that sample gain here less, since a step waits for its longest completions"
    ),
    ("streamrl", "11", "step"): (
        "published generation falls behind by three times as much a step while lengths are said to grow evenly"
    ),
    ("streamrl", "11", "GPUs"): "generation falls behind more slowly here, see the steps",
    ("streamrl", "section 7.3", ""): (
        "145 GB at 80 Gbps take 14.5 s: less than 10 s are fewer bytes or more links than the paper says"
    ),
    ("laminar", "9", ""): (
        "of the figure's 512 completions 495 still run when they have 1,700 tokens each and the cache is full; of"
        " figure 17's lengths a fifth is shorter than that: it is of longer completions, and so many more had to "
        "wait"
    ),
    ("laminar", "10", "staleness"): (
        "the figure's first half hour is .351, .416, .223 and .010, as it is here; what makes those after it "
        "older, nothing published tells"
    ),
    ("laminar", "12", ""): (
        "the figure's bars for Laminar are those of figure 11 within .3 % and the baselines' at 16 GPUs the same,"
        " though responses are a fifth as long and wait for tools: bars, caption and text disagree"
    ),
    ("laminar", "table 1", ""): _WHOLE,
    ("laminar", "11", ""): (
        "one-step trains on 8 GPUs at 16 and 32 GPUs, 28.5 and 45.3 thousand tokens/s, and Laminar generates on 8"
        " at both, 35.0 and 66.9: neither stage tells what holds it back at 16"
    ),
}
"""By paper, figure and the beginning of the system's name."""


def reason(row: Mapping[str, Any]) -> str:
    """Of a row or a ratio that is far off."""
    found = [
        (len(name), text)
        for (paper, figure, name), text in REASONS.items()
        if (paper, figure) == (row["paper"], row["figure"]) and row["system"].startswith(name)
    ]
    return max(found, default=(0, "not known"))[1]
