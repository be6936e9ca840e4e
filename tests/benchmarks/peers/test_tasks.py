"""The mixed task set."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.policy.tokenizer import build_mixed_tokenizer
from benchmarks.peers.tasks import (
    MAX_COMPLETION_LENGTH,
    PARTS,
    dataset,
    entries,
    read_mixed,
    split_of,
    verified,
    write_mixed,
)


def drawn(count: int, seed: int = 0, split: str = "train") -> list[dict[str, object]]:
    return list(islice(entries(seed, split), count))  # type: ignore[arg-type]


def test_no_held_out_question_is_ever_trained_on() -> None:
    trained = {(e["part"], str(e["prompt"]).lower()) for e in drawn(2000)}
    held_out = {(e["part"], str(e["prompt"]).lower()) for e in drawn(500, seed=1, split="held_out")}
    assert not trained & held_out


def test_upper_and_lower_case_of_a_question_are_on_the_same_side() -> None:
    assert split_of("spell", "Word") == split_of("spell", "word")


def test_the_same_seed_gives_the_same_entries_and_another_seed_others() -> None:
    assert drawn(50) == drawn(50)
    assert drawn(50) != drawn(50, seed=1)


def test_lengths_have_a_heavy_tail_and_fit_the_limit() -> None:
    tokenizer = build_mixed_tokenizer()
    lengths = [len(tokenizer(str(entry["answer"]))["input_ids"]) + 1 for entry in drawn(3000)]
    median, p99 = np.percentile(lengths, [50, 99])
    assert p99 >= 8 * median
    assert max(lengths) < MAX_COMPLETION_LENGTH


def test_parts_appear_by_their_shares() -> None:
    counted = Counter(entry["part"] for entry in drawn(3000))
    for part in PARTS:
        assert counted[part.name] / 3000 == pytest.approx(part.share, abs=0.05)


def test_right_answers_are_worth_one_and_an_early_end_is_worth_less() -> None:
    some = drawn(100)
    columns = {name: [entry[name] for entry in some] for name in ("answer", "metadata")}
    answers = [str(entry["answer"]) for entry in some]
    assert verified(answers, **columns) == [1.0] * 100  # type: ignore[arg-type]
    long = [index for index, answer in enumerate(answers) if len(answer) > 6]
    cut = verified([answer[:6] for answer in answers], **columns)  # type: ignore[arg-type]
    assert long
    assert all(cut[index] < 1.0 for index in long)


def test_the_reward_is_reasoning_gyms_own() -> None:
    entry = next(e for e in drawn(50) if e["part"] == "spell")
    own = dataset("spell_backward").score_answer("zz" + str(entry["answer"])[2:], entry)
    found = verified(["zz" + str(entry["answer"])[2:]], [str(entry["answer"])], [entry["metadata"]])
    assert found == [own]
    assert 0 < own < 1


def test_a_file_holds_what_was_asked_for_and_held_out_words_once(tmp_path: Path) -> None:
    write_mixed(tmp_path / "held_out.jsonl", 80, 3, "held_out")
    rows = read_mixed(tmp_path / "held_out.jsonl")
    words = [row["prompt"] for row in rows if row["part"] == "spell"]
    assert len(rows) == 80
    assert len(set(words)) == len(words) > 0
    assert all(set(row) == {"prompt", "answer", "metadata", "part"} for row in rows)
