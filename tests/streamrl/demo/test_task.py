from itertools import islice

from producers.prompts.settings import DataSettings
from producers.prompts.sources import open_source
from streamrl.demo.task import (
    DATASET,
    INSTRUCTION,
    OPTIONS,
    PROMPT_TEMPLATE,
    exact_match,
    held_out_entries,
    is_held_out,
    prompt_text,
    training_entries,
)


def data_settings() -> DataSettings:
    return DataSettings(
        dataset=DATASET,
        options=OPTIONS,
        filter="streamrl.demo.task:is_training_entry",
        prompt_template=PROMPT_TEMPLATE,
    )


def test_no_held_out_word_is_ever_trained_on() -> None:
    held_out = {entry["answer"].lower() for entry in held_out_entries(seed=0, num_entries=512)}
    source = open_source(data_settings(), run_seed=0)
    trained = {str(source.prompt_at(position)[0].columns["answer"]).lower() for position in range(2000)}
    warm = {entry["answer"].lower() for entry in islice(training_entries(seed=0), 2000)}
    assert len(held_out) > 500
    assert not held_out & (trained | warm)


def test_one_word_in_ten_is_held_out_in_either_case() -> None:
    words = [entry["metadata"]["word"] for entry in islice(training_entries(seed=3), 50)]
    assert not any(is_held_out(spelled) for word in words for spelled in (word, word.upper(), word.lower()))
    letters = "abcdefghijklmnopqrstuvwxyz"
    share = sum(is_held_out(a + b + c) for a in letters for b in letters for c in letters) / 26**3
    assert 0.09 < share < 0.11


def test_the_policy_is_warm_started_on_the_text_it_sees_in_a_run() -> None:
    prompt, _ = open_source(data_settings(), run_seed=5).prompt_at(0)
    question = prompt.text.removesuffix("\n")
    assert prompt.text == prompt_text({"question": question})
    assert question.startswith(INSTRUCTION)


def test_held_out_entries_are_distinct_and_repeat_for_a_seed() -> None:
    first, again, other = (held_out_entries(seed=seed, num_entries=100) for seed in (1, 1, 2))
    assert len({entry["answer"] for entry in first}) == 100
    assert first == again
    assert first != other


def test_exact_match_wants_every_letter_and_nothing_more() -> None:
    rewards = exact_match(completions=["nus", "nuss", "Nus", "nu", ""], answer=["nus"] * 5, prompts=[""] * 5)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]
