"""The policy's tokenizer behind the port."""

from pathlib import Path

import pytest
from pydantic import JsonValue
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from streamrl.producers.generation.incremental_text import StopMatcher
from streamrl.producers.generation.rollout import shown_text
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.errors import ModelError, PromptRefused
from streamrl.schemas.trajectories import ChatTurn, FinishReason, Prompt, SamplingParams
from tests.producers.generation.chat_templates import Family, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
UNKNOWN = {"unk_token": "<pad>"}
SPECIAL = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
LETTERS = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {chr(index + 30): index for index in range(3, 96)}


def write(
    directory: Path, *, habit: str = "$A", template: str | None = None, **chat_template_kwargs: JsonValue
) -> ModelTokenizer:
    tokenizer = Tokenizer(models.WordLevel(LETTERS, **UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=habit, special_tokens=[("<bos>", 2), ("<eos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **SPECIAL)
    fast.save_pretrained(directory)
    return ModelTokenizer(str(directory), chat_template_kwargs)


def prompt(content: str | tuple[ChatTurn, ...]) -> Prompt:
    return Prompt(prompt_id="p/0", dataset="p", content=content)


def ids(text: str) -> list[int]:
    return [LETTERS[letter] for letter in text]


@pytest.mark.parametrize(
    ("habit", "opening"), [("$A", []), ("<bos> $A", [2]), ("$A <eos>", []), ("<bos> $A <eos>", [2])]
)
def test_plain_text_gets_the_tokenizers_opening_and_never_an_end(
    tmp_path: Path, habit: str, opening: list[int]
) -> None:
    assert write(tmp_path, habit=habit).encode_prompt(prompt("1+1=")) == [*opening, *ids("1+1=")]


def test_chat_turns_go_through_the_template_exactly(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, habit="<bos> $A", template=TEMPLATE)
    turns = (ChatTurn(role="system", content="ab"), ChatTurn(role="user", content="cd"))
    assert tokenizer.encode_prompt(prompt(turns)) == ids("<s>ab<u>cd>")


def test_a_conversation_may_have_tools_if_the_template_reads_them(tmp_path: Path) -> None:
    template = TEMPLATE + "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}"
    tokenizer = write(tmp_path / "tools", template=template)
    turns = [{"role": "user", "content": "cd"}]
    assert tokenizer.reads_tools
    assert tokenizer.encode_chat(turns, [{"type": "function", "function": {"name": "add"}}]) == ids("<u>cd>add")
    assert tokenizer.encode_chat(turns) == ids("<u>cd>")
    plain, bare = write(tmp_path / "plain", template=TEMPLATE), write(tmp_path / "bare")
    assert (plain.has_chat_template, plain.reads_tools) == (True, False)
    assert (bare.has_chat_template, bare.reads_tools) == (False, False)


CALLS = TEMPLATE.replace("{{ m['content']", "{% for c in m.tool_calls or [] %}{{ c.f }}{% endfor %}{{ m['content']")


def test_a_conversation_is_rendered_whole_or_refused_by_the_part_that_the_template_leaves_out(tmp_path: Path) -> None:
    user, named = (ChatTurn.model_validate({"role": "user", "content": "cd", **more}) for more in ({}, {"name": "b"}))
    called = ChatTurn.model_validate({"role": "user", "content": "", "tool_calls": [{"f": "ab"}]})
    described = Prompt(prompt_id="p/0", dataset="p", content=(user,), columns={"tools": [{"f": "ab"}]})
    plain = write(tmp_path / "plain", template=TEMPLATE)
    for part, asked in (("tool_calls", prompt((user, called))), ("tools", described), ("name", prompt((named,)))):
        with pytest.raises(PromptRefused, match=f"that shows {part} to the model"):
            plain.encode_prompt(asked)
    reads = write(tmp_path / "reads", template="{% for t in tools or [] %}{{ t.f }}{% endfor %}" + CALLS)
    assert reads.encode_prompt(prompt((user, called))) == ids("<u>cd<u>ab>")
    assert reads.encode_prompt(described) == ids("ab<u>cd>")
    thought = ChatTurn.model_validate({"role": "assistant", "content": "b", "reasoning_content": "a"})
    with pytest.raises(PromptRefused, match="that shows reasoning_content to the model"):
        plain.encode_prompt(prompt((thought, user)))
    drops = write(tmp_path / "drops", template="{% if false %}{{ m.reasoning_content }}{% endif %}" + TEMPLATE)
    assert drops.encode_prompt(prompt((thought, user))) == ids("<a>b<u>cd>")
    answered = ChatTurn.model_validate({"role": "tool", "content": "a", "name": "b", "tool_call_id": "c"})
    assert plain.encode_prompt(prompt((user, answered))) == ids("<u>cd<t>a>")


def test_a_turn_that_the_template_leaves_out_is_refused_with_its_role(tmp_path: Path) -> None:
    only = "{% if m['role'] in ('user', 'assistant') or loop.first and m['role'] == 'system' %}<"
    tokenizer = write(tmp_path, template=TEMPLATE.replace("<", only, 1).replace("{% endfor", "{% endif %}{% endfor"))
    system, user, tool = (ChatTurn(role=role, content="ab") for role in ("system", "user", "developer"))
    assert tokenizer.encode_prompt(prompt((system, user))) == ids("<s>ab<u>ab>")
    for turns, role in (((tool, user), "developer"), ((system, system, user), "system")):
        with pytest.raises(PromptRefused, match=f"got one that leaves a turn of role {role} out"):
            tokenizer.encode_prompt(prompt(turns))
    shouts = write(tmp_path / "shouts", template=TEMPLATE.replace("m['content']", "m['content'] | upper"))
    assert shouts.encode_prompt(prompt((user,))) == ids("<u>AB>")
    silent = ChatTurn(role="developer", content=" ")
    assert tokenizer.encode_prompt(prompt((silent, user))) == ids("<u>ab>")


def test_special_tokens_are_written_out_where_they_are_asked_for(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, habit="<bos> $A")
    said = [*ids("ab"), 1]
    assert "<eos>" in tokenizer.decode_with_special(said)
    assert "<eos>" not in tokenizer.decode(said)
    assert [tokenizer.is_special(token) for token in said] == [False, False, True]
    assert tokenizer.encode_text("ab") == [2, *ids("ab")]


def test_the_template_gets_the_variables_of_the_settings(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if enable_thinking is not false %}?{% endif %}{{ level or '' }}"
    turns = (ChatTurn(role="user", content="cd"),)
    assert write(tmp_path, template=template).encode_prompt(prompt(turns)) == ids("<u>cd>?")
    silent = write(tmp_path, template=template, enable_thinking=False, level="ab")
    assert silent.encode_prompt(prompt(turns)) == ids("<u>cd>ab")


@pytest.mark.parametrize(("template", "got"), [(TEMPLATE, "one that does not"), (None, "none")])
def test_a_variable_that_no_template_reads_is_the_users_error(tmp_path: Path, template: str | None, got: str) -> None:
    with pytest.raises(ModelError, match=rf"reads enable_thinkin \(data\.chat_template_kwargs\), got {got}"):
        write(tmp_path, template=template, enable_thinkin=False)


def test_chat_without_a_template_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template"):
        write(tmp_path).encode_prompt(prompt((ChatTurn(role="user", content="a"),)))


def test_special_tokens_are_not_text(tmp_path: Path) -> None:
    assert write(tmp_path).decode([*ids("ab"), 1]).replace(" ", "") == "ab"


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a tokenizer at") as caught:
        ModelTokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


THINKING = Family("", ("<think>", "</think>", "<|im_end|>", "<|eot|>"), "<|im_end|>", "")
WRITTEN = "<think>12*7</think>84<|im_end|>"


@pytest.mark.parametrize(
    ("stop", "included", "skips", "sampled", "shown"),
    [
        ((), False, True, WRITTEN, "12*784"),
        ((), False, False, WRITTEN, "<think>12*7</think>84"),
        (("84",), False, False, "<think>12*7</think>84", "<think>12*7</think>"),
        # A stop string may be a special token, or have one in it.
        (("</think>",), False, True, "<think>12*7</think>", "12*7"),
        (("</think>",), True, True, "<think>12*7</think>", "12*7</think>"),
        (("</think>",), True, False, "<think>12*7</think>", "<think>12*7</think>"),
        (("</think>8",), False, True, "<think>12*7</think>8", "12*7"),
        (("7</think>8",), True, True, "<think>12*7</think>8", "12*7</think>8"),
        # So may the token that ends a completion by itself.
        (("<|im_end|>",), False, True, WRITTEN, "12*784"),
        (("<|im_end|>",), True, True, WRITTEN, "12*784<|im_end|>"),
        (("\n<|im_end|>",), False, True, WRITTEN, "12*784"),
        (("<|eot|>",), False, True, "84<|eot|>", "84"),
    ],
)
def test_stop_strings_may_be_special_tokens_and_rewards_may_see_them(
    tmp_path: Path, stop: tuple[str, ...], included: bool, skips: bool, sampled: str, shown: str
) -> None:
    save_tokenizer(THINKING, tmp_path)
    tokenizer = ModelTokenizer(str(tmp_path))
    sampling = SamplingParams(
        max_completion_length=99, stop=stop, include_stop_str_in_output=included, skip_special_tokens=skips
    )
    token_ids = tokenizer.encode_more(sampled)
    assert shown_text(tokenizer.decoder_for(sampling)(token_ids), FinishReason.STOP, sampling) == shown
    if not stop or sampled == WRITTEN:
        return
    for known in range(len(token_ids)):  # the beginning may have been sampled elsewhere
        matcher = StopMatcher(sampling, tokenizer)
        ended = [known] if known and matcher.start_after(token_ids[:known]) else []
        ended += [end for end in range(known + 1, len(token_ids) + 1) if matcher.is_complete(end, token_ids[:end])]
        assert ended == [len(token_ids)]
