"""Stop strings are found in text that grows by tokens, which may be part of a character or begin with a space."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from streamrl.producers.generation.engines.port import ActiveCompletion, Decode
from streamrl.producers.generation.incremental_text import StopMatcher
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Prompt, SamplingParams
from tests.producers.generation.engines.replay import request


class ByteTokenizer:
    """Every byte of UTF-8 is a token, so most characters beyond ASCII take several."""

    def __init__(self) -> None:
        alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
        self._tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt.text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        return self.decode

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text


class WordTokenizer(ByteTokenizer):
    """Words with the space before them in the token, which a text does not begin with: as SentencePiece has it."""

    WORDS = ("▁the", "▁end", "▁", "s", "end", "ing")

    def __init__(self) -> None:
        words = {word: number for number, word in enumerate(self.WORDS)}
        self._tokenizer = Tokenizer(models.WordLevel(words, unk_token="s"))
        self._tokenizer.decoder = decoders.Metaspace()


def ended_at(tokenizer: ByteTokenizer, tokens: Sequence[int], stop: tuple[str, ...], known: int = 0) -> int | None:
    """After how many tokens the matcher said so, of which it was told ``known`` at once; None: never."""
    sampling = SamplingParams(max_completion_length=1000, stop=stop)
    asked = replace(request([1], **sampling.model_dump()), prefix_token_ids=tokens[:known])
    completion = ActiveCompletion(asked, 1000, 0)
    matcher = StopMatcher(sampling, tokenizer)
    if known and matcher.start_after(tokens[:known]):
        return known
    for number, token in enumerate(tokens[known:]):
        completion.extend([token], [0.0])
        if matcher.is_complete(completion.generated, completion.tokens):
            return completion.generated
        if number % 3 == 0:  # handed over meanwhile
            completion.take(PolicyVersion(1, 0))
    return None


@given(
    text=st.text(alphabet="ab<é€🙂 \n", max_size=60),
    stop=st.lists(st.text(alphabet="ab<é€🙂 \n", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(text="é🙂<b", stop=["🙂<"])
@settings(deadline=None, max_examples=300)
def test_the_first_token_after_which_the_text_has_a_stop_string_ends_it(text: str, stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    texts = [tokenizer.decode(tokens[:end]) for end in range(1, len(tokens) + 1)]
    first = next((end for end, shown in enumerate(texts, 1) if any(one in shown for one in stop)), None)
    assert ended_at(tokenizer, tokens, tuple(stop)) == first
    # Told of a beginning at once, it finds the same end; one that lies in that beginning, at its last token.
    for known in {1, len(tokens) // 2, len(tokens) - 1, len(tokens)} - {0, -1} if tokens else ():
        assert ended_at(tokenizer, tokens, tuple(stop), known) == (first and max(first, known))


@given(st.lists(st.integers(0, len(WordTokenizer.WORDS) - 1), max_size=20))
def test_spaces_between_words_are_part_of_the_text(tokens: list[int]) -> None:
    tokenizer = WordTokenizer()
    texts = [tokenizer.decode(tokens[:end]) for end in range(1, len(tokens) + 1)]
    for stop in (" end", "s e", "theend"):
        first = next((end for end, shown in enumerate(texts, 1) if stop in shown), None)
        assert ended_at(tokenizer, tokens, (stop,)) == first
        for known in range(1, len(tokens) + 1):
            assert ended_at(tokenizer, tokens, (stop,), known) == (first and max(first, known))


def test_bytes_that_never_become_a_character_do_not_hold_the_text_back() -> None:
    tokenizer = ByteTokenizer()
    lone = tokenizer.encode("€")[:1]
    assert ended_at(tokenizer, lone * 500 + tokenizer.encode("stop!"), ("op",)) == 504


@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [("abcd", ("cd", "b"), (1, 2)), ("abc", ("bc", "c"), (1, 3)), ("abc", ("c", "bc"), (2, 3)), ("abc", ("d",), None)],
)
def test_the_string_that_is_complete_first_counts_then_the_one_listed_first(
    text: str, stop: tuple[str, ...], found: tuple[int, int] | None
) -> None:
    assert SamplingParams(max_completion_length=1, stop=stop).find_stop(text) == found
