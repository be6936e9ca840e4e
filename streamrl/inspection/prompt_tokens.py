"""What a model sees, before a run: a prompt's tokens, its answer's, and the tokens that end a completion."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.producers.generation.engines.port import encoded, refuse_unknown
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.errors import ModelError, PromptRefused, UserError
from streamrl.schemas.plain_text import plain_json
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.tree import Settings


@dataclass(frozen=True)
class SeenToken:
    """A token's id and its text, special tokens included."""

    id: int
    text: str


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt as the model sees it. ``answer``: the row's answer as the end of a completion; empty if it has none.

    ``ends``: the tokens at which a completion ends, as text.
    """

    prompt_id: str
    tokens: Sequence[SeenToken]
    answer: Sequence[SeenToken]
    ends: str


def show_prompt(position: int, settings: Settings, *, as_json: bool) -> None:
    """Print the tokens of the prompt at a position of the run.

    Raises:
        UserError: the run has no prompts or no tokenizer, or a worker would refuse the prompt.
    """
    seen = see_prompt(position, settings)
    if as_json:
        shown: dict[str, Any] = {name: getattr(seen, name) for name in ("prompt_id", "ends")}
        shown |= {name: [vars(token) for token in getattr(seen, name)] for name in ("tokens", "answer")}
        print(plain_json(json.dumps(shown, ensure_ascii=False, indent=2)))
        return
    print(f"prompt {position} is {seen.prompt_id}, {len(seen.tokens)} tokens:")
    print("\n".join(_lines(seen.tokens)))
    if seen.answer:
        print(f"its answer as a completion, {len(seen.answer)} tokens:")
        print("\n".join(_lines(seen.answer)))
    print(f"a completion ends at {seen.ends}")


def _lines(tokens: Sequence[SeenToken]) -> list[str]:
    # The quotes of ``repr`` show where a token starts and ends, and it escapes line breaks.
    return [f"{index:>7}  {token.id:>7}  {token.text!r}" for index, token in enumerate(tokens)]


def see_prompt(position: int, settings: Settings) -> SeenPrompt:
    """The prompt at a position of the run, tokenised and refused as a worker does.

    Raises:
        UserError: see ``show_prompt``.
    """
    from streamrl.producers.generation.engines.model_files import read_facts
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    if settings.generation.engine == "emulated":
        raise UserError('expected a run with a model, got generation.engine = "emulated", which has no tokenizer')
    prompt, _ = open_source(settings.data, run_seed=settings.run.seed).prompt_at(position)
    facts = read_facts(settings.model.path, settings.generation.max_model_len)
    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    try:
        token_ids = encoded(tokenizer, prompt, min(settings.loop.max_prompt_length, facts.max_length - 1))
        refuse_unknown(token_ids, facts.vocab_size)
    except PromptRefused as error:
        raise UserError(f"prompt {position}, {prompt.prompt_id}: {error}; a worker would refuse it") from error

    def seen(ids: Sequence[int]) -> list[SeenToken]:
        return [SeenToken(one, tokenizer.decode_with_special([one])) for one in ids]

    return SeenPrompt(prompt.prompt_id, seen(token_ids), seen(_answer(tokenizer, prompt)), str(facts.ends))


def _answer(tokenizer: Any, prompt: Prompt) -> list[int]:
    answer = prompt.columns.get("answer")
    ids: list[int] = tokenizer.encode_more(answer) if isinstance(answer, str) else []
    return ids


def completion_ends(settings: Settings) -> str:
    """A line with the tokens at which a completion of the model ends, if the model is on this machine."""
    path = settings.model.path
    if settings.generation.engine == "emulated":
        return "emulated lengths"
    if not Path(path).is_dir():
        return f"known where {path} is a directory; the dry run shows them"
    from streamrl.producers.generation.vocabulary import end_tokens, load_tokenizer

    try:
        return str(end_tokens(path, load_tokenizer(path)))
    except ModelError as error:
        return f"not known: {error}"
