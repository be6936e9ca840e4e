"""``[emulation.lengths]``: how long completions are."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.settings import Section

Bin = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]

STREAMRL_BINS: tuple[Bin, ...] = (
    (839, 0.1251), (1474, 0.1690), (2109, 0.1208), (2741, 0.1163), (3376, 0.0772), (4011, 0.0616),
    (4646, 0.0528), (5281, 0.0303), (5916, 0.0331), (6549, 0.0215), (7184, 0.0156), (7819, 0.0225),
    (8454, 0.0156), (9089, 0.0049), (9724, 0.0068), (10357, 0.0039), (10991, 0.0068), (11626, 0.0029),
    (12261, 0.0127), (12896, 0.0078), (13531, 0.0078), (14164, 0.0195), (14799, 0.0059), (15434, 0.0068),
    (16069, 0.0078), (16704, 0.0107), (17339, 0.0088), (17972, 0.0107), (18607, 0.0059), (19241, 0.0088),
)  # fmt: skip
"""Output lengths of StreamRL's evaluation (its figure 7, read off the picture): where a bin starts, its share."""


class LengthTraceSettings(Section):
    """``[emulation.lengths]``: the length of each completion, a function of these settings and its name alone."""

    source: Annotated[
        Literal["lognormal", "histogram", "file", "column"],
        Field(description="What lengths are drawn from; column: not drawn, but given with each prompt."),
    ] = "lognormal"
    seed: Annotated[int, Field(ge=0, description="Of the draw.")] = 0
    median_tokens: Annotated[float, Field(gt=0, description="lognormal: half the completions are shorter.")] = 1000.0
    p99_over_median: Annotated[
        float, Field(ge=1, description="lognormal: the 99th percentile as a multiple of the median.")
    ] = 10.0
    histogram: Annotated[
        tuple[Bin, ...],
        Field(min_length=1, description="histogram: (first length of a bin, its share); the default is StreamRL's."),
    ] = STREAMRL_BINS
    histogram_end_tokens: Annotated[float, Field(gt=0, description="histogram: where its last bin ends.")] = 19876.0
    path: Annotated[
        Path | None,
        Field(
            description="file: .npy with whole numbers, or .jsonl with a number, or an object with 'length', a line."
        ),
    ] = None
    column: Annotated[
        str, Field(description="column: the prompt's column with its length in tokens, or a list, one per sample.")
    ] = "length"
    factor: Annotated[float, Field(gt=0, description="Every length is multiplied by it.")] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1, description="Longer ones end there; unset: nowhere.")] = None
    prompt_share: Annotated[
        float,
        Field(ge=0, le=1, description="Share of the variance (of the normal score) that samples of a prompt share."),
    ] = 0.0
    prompt_characters_per_token: Annotated[
        float, Field(gt=0, description="Characters of a prompt that count as one token.")
    ] = 4.0

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.source == "file" and (self.path is None or self.path.suffix not in (".npy", ".jsonl")):
            raise ValueError(f"expected emulation.lengths.path, a .npy or .jsonl file, got {self.path}")
        starts = [start for start, _ in self.histogram]
        if [*starts, self.histogram_end_tokens] != sorted({*starts, self.histogram_end_tokens}):
            raise ValueError("expected emulation.lengths.histogram with ascending starts below histogram_end_tokens")
        if not sum(share for _, share in self.histogram):
            raise ValueError("expected a share above 0 in emulation.lengths.histogram, got none")
        return self
