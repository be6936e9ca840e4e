"""The policy's own tokenizer behind the tokenizer port. Knows nothing of engines.

Plain text gets the tokens that the tokenizer itself puts in front, such as a beginning-of-sequence token, unless the
text starts with them. It gets no end-of-sequence token, which would end the prompt. Chat turns get exactly the tokens
that the chat template writes. A last turn of the assistant is not closed: the completion continues it.
"""

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import JsonValue

from streamrl.producers.generation.engines.port import Decode
from streamrl.producers.generation.vocabulary import end_tokens, load_tokenizer, special_tokens
from streamrl.schemas.errors import ModelError, PromptRefused
from streamrl.schemas.trajectories import Prompt, SamplingParams

_PARTS = ("tool_calls", "function_call", "tools", "name")
"""Parts of a conversation: if the chat template leaves one out, the prompt is refused. A tool's turn may lose its name,
which the call before it has, too."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Thoughts of a turn before its content. A template that reads them may leave old ones out."""


class ModelTokenizer:
    """A ``Tokenizer`` read from a model directory; the chat template gets ``chat_template_kwargs`` as variables."""

    def __init__(self, model_path: str, chat_template_kwargs: Mapping[str, JsonValue] = MappingProxyType({})) -> None:
        """Load the tokenizer.

        Raises:
            ModelError: there is no tokenizer, or the chat template does not read one of the variables.
        """
        self._model_path = model_path
        self._tokenizer: Any = load_tokenizer(model_path)
        self.ends = end_tokens(model_path, self._tokenizer)
        self._no_text = {**special_tokens(self._tokenizer), **self.ends.texts}
        self._chat_template_kwargs = dict(chat_template_kwargs)
        self._opening: list[int] | None = None
        self._unseen_roles: dict[tuple[tuple[str, bool], ...], str | None] = {}
        # Templates ignore unknown variables, so a misspelt name would silently have no effect.
        template = str(self._tokenizer.chat_template or "")
        self._parts = (*_PARTS, *(part for part in _THOUGHTS if part not in template))
        for name in chat_template_kwargs:
            if name not in template:
                raise ModelError(
                    f"expected a chat template at {model_path} that reads {name} (data.chat_template_kwargs), "
                    f"got {'one that does not' if template else 'none'}; remove the key, or correct its name"
                )

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Chat turns go through the model's chat template, with the start of the answer.

        Raises:
            ModelError: the prompt has chat turns, and the model has no chat template.
            PromptRefused: the chat template would leave out a part of the prompt.
        """
        if isinstance(prompt.content, str):
            return self._with_opening(prompt.content)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"expected a chat template in the tokenizer at {self._model_path} for prompt {prompt.prompt_id}, "
                f"got none; use plain text prompts or an instruction-tuned model"
            )
        turns: list[dict[str, JsonValue]] = [turn.model_dump() for turn in prompt.content]
        token_ids = self.encode_chat(turns, prompt.tools)
        if (role := self._unseen_role(turns, prompt.tools)) is not None:
            raise PromptRefused(
                f"with a turn of role {role}, which the chat template leaves out",
                f"expected a chat template at {self._model_path} that shows every turn to the model, got one that "
                f"leaves a turn of role {role} out; use roles and an order of turns that the model was taught",
            )
        for part in self._parts:
            less = [{key: turn[key] for key in turn if key != part or turn["role"] == "tool"} for turn in turns]
            tools = [] if part == "tools" else prompt.tools
            if (less != turns or tools != prompt.tools) and self._says_the_same(token_ids, less, tools):
                raise PromptRefused(
                    f"with {part}, which the chat template leaves out",
                    f"expected a chat template at {self._model_path} that shows {part} to the model, got one that "
                    f"leaves {part} out; use a model that was taught to read it, or remove it from the data",
                )
        return token_ids

    def _unseen_role(
        self, turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]]
    ) -> str | None:
        """The role of a turn whose text the chat template leaves out; None if it shows all of them."""
        # Looked for with made-up texts, so that the answer depends on the roles only, and is the same for most prompts.
        spoken = tuple((str(turn["role"]), bool(str(turn["content"]).strip())) for turn in turns)
        if spoken not in self._unseen_roles:
            marked = [
                {**turn, "content": f"text {place}."} if speaks else turn
                for place, (turn, (_, speaks)) in enumerate(zip(turns, spoken, strict=True))
            ]
            try:
                rendered = str(self._rendered(marked, tools, tokenize=False)).casefold()
            except Exception:  # a template that looks into the texts shows them
                return None
            self._unseen_roles[spoken] = next(
                (role for place, (role, speaks) in enumerate(spoken) if speaks and f"text {place}." not in rendered),
                None,
            )
        return self._unseen_roles[spoken]

    def _says_the_same(
        self, token_ids: list[int], turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]]
    ) -> bool:
        try:
            return self.encode_chat(turns, tools) == token_ids
        except Exception:  # a template that misses the part reads it
            return False

    @property
    def has_chat_template(self) -> bool:
        """Whether chat turns can be rendered."""
        return bool(self._tokenizer.chat_template)

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template describes tools to the model."""
        return "tools" in str(self._tokenizer.chat_template or "")

    @property
    def transformers_tokenizer(self) -> Any:
        """Transformers' own tokenizer object, for libraries that need it."""
        return self._tokenizer

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a prompt that is plain text."""
        return self._with_opening(text)

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other tokens, without a beginning-of-sequence token."""
        return self._plain(text)

    def encode_chat(
        self, turns: Sequence[Mapping[str, JsonValue]], tools: Sequence[Mapping[str, JsonValue]] | None = None
    ) -> list[int]:
        """Token ids of chat turns as the template writes them, with the start of the answer. Needs a chat template.

        Raises:
            Exception: the template may raise any exception.
        """
        token_ids: list[int] = self._rendered(turns, tools, tokenize=True)
        return token_ids

    def _rendered(
        self,
        turns: Sequence[Mapping[str, JsonValue]],
        tools: Sequence[Mapping[str, JsonValue]] | None,
        *,
        tokenize: bool,
    ) -> Any:
        continues = turns[-1].get("role") == "assistant"
        if continues and turns[-1].get("tool_calls"):
            raise ValueError("expected a tool's turn after an assistant's turn with tool_calls, got none")
        return self._tokenizer.apply_chat_template(
            list(turns),
            tools=list(tools) if tools else None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=tokenize,
            return_dict=False,
            **self._chat_template_kwargs,
        )

    def opens_turn(self, prompt: Prompt) -> bool:
        """Whether the chat template adds something after a conversation's last turn, for the model's own turn.

        Raises:
            Exception: the template may raise any exception.
        """
        turns = [turn.model_dump() for turn in prompt.content if not isinstance(turn, str)]
        closed, opened = (
            self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=opens, tokenize=False, **self._chat_template_kwargs
            )
            for opens in (False, True)
        )
        return bool(closed != opened)

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        """The decoder of the text in which stop strings are found, and which rewards see.

        It leaves out special tokens if ``sampling`` says so, except those that are in a stop string. It leaves out
        every token that ends a completion, except one that is a stop string.
        """
        hidden = self._no_text if sampling.skip_special_tokens else self.ends.texts
        shown = {
            number
            for number, text in hidden.items()
            if (text in sampling.stop if number in self.ends.texts else any(text in stop for stop in sampling.stop))
        }
        return self._decoder_without(hidden.keys() - shown)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens and tokens that end a completion."""
        return self._decoder_without(self._no_text.keys())(token_ids)

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, including special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special token, or ends a completion."""
        return token_id in self._no_text

    def _decoder_without(self, hidden: Container[int]) -> Decode:
        return lambda token_ids: self.decode_with_special([token for token in token_ids if token not in hidden])

    def _with_opening(self, text: str) -> list[int]:
        plain = self._plain(text)
        if self._opening is None:
            self._opening = self._opening_before(text, plain)
        opening = self._opening or []
        # The text may start with the opening itself, as the output of a chat template does.
        return plain if not plain or plain[: len(opening)] == opening else opening + plain

    def _opening_before(self, text: str, plain: Sequence[int]) -> list[int] | None:
        """The tokens that the tokenizer puts before any text; None if this one does not show them."""
        special: list[int] = self._tokenizer(text)["input_ids"]
        starts = range(len(special) - len(plain) + 1) if plain else ()
        return next((special[:start] for start in starts if special[start : start + len(plain)] == plain), None)

    def _plain(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids
