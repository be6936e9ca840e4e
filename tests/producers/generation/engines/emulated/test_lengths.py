import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from streamrl.producers.generation.engines.length_trace import LengthTraceSettings, trace_length
from streamrl.schemas.errors import DataError
from streamrl.schemas.trajectories import Prompt

NUMBER = 20_000


def _drawn(settings: LengthTraceSettings) -> list[int]:
    return [trace_length(settings, f"d/{group}/0", 0, None) for group in range(NUMBER)]


def _prompt(number: int, **columns: object) -> Prompt:
    return Prompt(prompt_id=f"d/{number}", dataset="d", content="x", columns=columns)


def test_a_length_depends_on_the_names_and_the_seed_alone() -> None:
    settings = LengthTraceSettings()
    assert trace_length(settings, "d/1/0", 3, None) == trace_length(settings, "d/1/0", 3, _prompt(1)) == 215
    others = [("d/1/0", 4, 0), ("d/1/1", 3, 0), ("d/1/0", 3, 1)]
    lengths = {trace_length(LengthTraceSettings(seed=seed), group, index, None) for group, index, seed in others}
    assert len(lengths | {215}) == 4


def test_lognormal_lengths_have_the_stated_median_and_tail() -> None:
    lengths = _drawn(LengthTraceSettings(median_tokens=1000, p99_over_median=10))
    assert np.quantile(lengths, [0.5, 0.99]) == pytest.approx([1000, 10_000], rel=0.06)
    assert max(_drawn(LengthTraceSettings(max_tokens=5000))) == 5000


def test_the_histogram_of_the_paper_has_its_quantiles() -> None:
    lengths = _drawn(LengthTraceSettings(source="histogram"))
    assert np.mean(lengths) == pytest.approx(4934, rel=0.03)
    assert np.quantile(lengths, [0.25, 0.5, 0.9]) == pytest.approx([1943, 3206, 12940], rel=0.05)
    assert 839 <= min(lengths) < max(lengths) <= 19876
    assert np.mean(_drawn(LengthTraceSettings(source="histogram", factor=0.25))) == pytest.approx(4934 / 4, rel=0.03)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_samples_of_a_prompt_share_as_much_variance_as_stated(share: float) -> None:
    settings = LengthTraceSettings(prompt_share=share)
    logs = np.log(
        [[trace_length(settings, f"d/{n}/{n % 2}", index, _prompt(n)) for index in (0, 1)] for n in range(5000)]
    )
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(share, abs=0.03)
    assert np.exp(np.median(logs)) == pytest.approx(1000, rel=0.06)


def test_lengths_are_drawn_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 5, 7, 100]))
    lines = [5, {"length": 5}, 7, {"length": 100, "prompt": "x"}]
    (tmp_path / "lengths.jsonl").write_text("\n".join(map(json.dumps, lines)))
    both = [_drawn(LengthTraceSettings(source="file", path=tmp_path / f"lengths.{kind}")) for kind in ("npy", "jsonl")]
    assert both[0] == both[1]
    assert {length: both[0].count(length) / NUMBER for length in set(both[0])} == pytest.approx(
        {5: 0.5, 7: 0.25, 100: 0.25}, abs=0.02
    )


@pytest.mark.parametrize("content", ["", "0", '{"tokens": 3}', "[1", '"a"'])
def test_a_file_without_lengths_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"lengths\.jsonl"):
        trace_length(LengthTraceSettings(source="file", path=path), "g", 0, None)


def test_a_column_gives_the_length_of_each_sample() -> None:
    settings = LengthTraceSettings(source="column", column="tokens", factor=2)
    assert trace_length(settings, "g", 1, _prompt(1, tokens=30)) == 60
    assert trace_length(settings, "g", 1, _prompt(1, tokens=[30, 40])) == 80
    for prompt in (None, _prompt(1), _prompt(1, tokens="30"), _prompt(1, tokens=[]), _prompt(1, tokens=-1)):
        with pytest.raises(DataError, match="'tokens'"):
            trace_length(settings, "g", 1, prompt)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "file"},
        {"source": "file", "path": "x.bin"},
        {"histogram": ((5, 1), (3, 1))},
        {"histogram": ((5, 0),)},
    ],
)
def test_settings_that_describe_no_lengths_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"emulation\.lengths"):
        LengthTraceSettings.model_validate(wrong)
