"""A model's tokenizer as its library loads it, its special tokens, and the tokens that end a completion.

Models name their ends in up to three places, and the places often disagree: a chat model's configuration may still name
the base model's end, while its tokenizer names the end of a turn. So the union of all three counts.

Invariant every_named_end_ends_a_completion: a token that one of the three names is an end for every engine, and no
part of the text that rewards see.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from streamrl.schemas.errors import ModelError


def load_tokenizer(model_path: str) -> Any:
    """Transformers' tokenizer of a model.

    Raises:
        ModelError: there is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise ModelError(
            f"expected a tokenizer at {model_path}, got: {reason}; use a model directory that has one"
        ) from error
    # For a model without tokenizer files the library makes a tokenizer without any text tokens.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ModelError(
            f"expected a tokenizer at {model_path}, got a model without one (no tokenizer.json or the like); "
            "copy the files of the tokenizer that belongs to the model into its directory"
        )
    return tokenizer


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The texts of a tokenizer's special tokens, by id."""
    # ``all_special_tokens`` lacks tokens that only tokenizer.json marks as special, such as Llama 3's reserved ones.
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the largest id of a token that is not special."""
    # Special tokens do not count: the library adds its own defaults, such as <|endoftext|>, which no prompt has.
    return 1 + max(set(tokenizer.get_vocab().values()) - special_tokens(tokenizer).keys(), default=-1)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end a completion. ``texts``: the text of each by id; ``places``: where the model names it."""

    texts: Mapping[int, str]
    places: Mapping[int, tuple[str, ...]]

    @property
    def ids(self) -> frozenset[int]:
        """The token ids."""
        return frozenset(self.texts)

    def __str__(self) -> str:
        named = (f"{text!r} ({number}: {', '.join(self.places[number])})" for number, text in self.texts.items())
        return " or ".join(named) or "no token (generation_config, config and tokenizer name none)"


def end_tokens(model_path: str, tokenizer: Any, config: Any = None) -> EndTokens:
    """The tokens that end a completion of a model: what its generation config, config and tokenizer name.

    ``tokenizer``: transformers' own, None if there is none. ``config``: the model's, if it is loaded already.

    Raises:
        ModelError: one of the places names something that is not a token.
    """
    config = _config(model_path) if config is None else config
    text_config = None if config is None else config.get_text_config()
    named = {
        "generation_config": _generation_end(model_path),
        "config": getattr(text_config, "eos_token_id", None),
        "tokenizer": getattr(tokenizer, "eos_token_id", None),
    }
    size = getattr(text_config, "vocab_size", None)
    places: dict[int, tuple[str, ...]] = {}
    for place, value in named.items():
        for number in dict.fromkeys(_token_ids(value, tokenizer, f"{place} of {model_path}")):
            # Ids that the model cannot sample, such as -1, end nothing.
            if number >= 0 and (size is None or number < size):
                places[number] = (*places.get(number, ()), place)
    return EndTokens({number: _text(number, tokenizer) for number in places}, places)


def _config(model_path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(model_path)
    except Exception:  # a tokenizer's directory need not have a model; code that loads the model reports this
        return None


def _generation_end(model_path: str) -> Any:
    try:
        return GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # most base models have no such file
        return None


def _token_ids(value: Any, tokenizer: Any, where: str) -> Iterator[int]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, int) and not isinstance(one, bool):
            yield one
        elif isinstance(one, str) and tokenizer is not None and one in (added := tokenizer.get_added_vocab()):
            yield added[one]
        elif one is not None:
            raise ModelError(
                f"expected a token id, a list of them, or a special token's text as eos_token_id in {where}, got "
                f"{value!r}; correct the file"
            )


def _text(number: int, tokenizer: Any) -> str:
    return f"#{number}" if tokenizer is None else str(tokenizer.decode([number]))
