"""Small chat templates of twenty model families, and tokenizers that have their special tokens."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

QUESTION, ANSWER, NEXT = "2+2?", "4", "3+3?"
"""The conversation of ``Family.rendered``: a user's turn, the assistant's, and another of the user's."""


@dataclass(frozen=True)
class Family:
    """A family's template, special tokens and end. ``opening``: the tokens that its tokenizer puts before plain text.

    ``rendered``: the conversation above as the template writes it, with the start of the answer.
    """

    template: str
    special: tuple[str, ...]
    end: str
    rendered: str
    opening: tuple[str, ...] = ()
    takes_system: bool = True


MARKS = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_RENDERED = (
    "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"

FAMILIES = {
    "qwen2.5": Family(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML,
        MARKS,
        "<|im_end|>",
        "<|im_start|>system\nYou help.<|im_end|>\n" + CHATML_RENDERED,
    ),
    "qwen3": Family(
        "{% for m in messages %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
        "<|im_start|>{{ m.role }}\n{{ content if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        MARKS,
        "<|im_end|>",
        CHATML_RENDERED,
    ),
    "smollm2": Family(CHATML, MARKS, "<|im_end|>", CHATML_RENDERED),
    "internlm2": Family(
        "{{ bos_token }}" + CHATML, ("<s>", *MARKS), "<|im_end|>", "<s>" + CHATML_RENDERED, opening=("<s>",)
    ),
    "llama2": Family(
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content.strip() }} {{ eos_token }}"
        "{% else %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
        "<s>[INST] 2+2? [/INST] 4 </s><s>[INST] 3+3? [/INST]",
        opening=("<s>",),
    ),
    "llama3": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n3+3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        opening=("<|begin_of_text|>",),
    ),
    "mistral": Family(
        NO_SYSTEM + "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
        "<s> [INST] 2+2? [/INST] 4</s> [INST] 3+3? [/INST]",
        opening=("<s>",),
        takes_system=False,
    ),
    "mistral-nemo": Family(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}"
        "{{ eos_token }}{% else %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        "</s>",
        "<s>[INST]2+2?[/INST]4</s>[INST]3+3?[/INST]",
        opening=("<s>",),
    ),
    "gemma": Family(
        NO_SYSTEM + "{{ bos_token }}{% for m in messages %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n"
        "<start_of_turn>user\n3+3?<end_of_turn>\n<start_of_turn>model\n",
        opening=("<bos>",),
        takes_system=False,
    ),
    "phi3": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        "<|endoftext|>",
        "<|user|>\n2+2?<|end|>\n<|assistant|>\n4<|end|>\n<|user|>\n3+3?<|end|>\n<|assistant|>\n",
    ),
    "phi4": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        (*MARKS, "<|im_sep|>"),
        "<|im_end|>",
        "<|im_start|>user<|im_sep|>2+2?<|im_end|><|im_start|>assistant<|im_sep|>4<|im_end|>"
        "<|im_start|>user<|im_sep|>3+3?<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<s>", "</s>"),
        "</s>",
        "<|user|>\n2+2?</s>\n<|assistant|>\n4</s>\n<|user|>\n3+3?</s>\n<|assistant|>\n",
        opening=("<s>",),
    ),
    "vicuna": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
        "{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}{{ eos_token }}{% else %}{{ m.content }} {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        ("<s>", "</s>"),
        "</s>",
        "<s>USER: 2+2? ASSISTANT: 4</s>USER: 3+3? ASSISTANT:",
        opening=("<s>",),
    ),
    "deepseek-r1": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜>4<｜end▁of▁sentence｜><｜User｜>3+3?<｜Assistant｜><think>\n",
        opening=("<｜begin▁of▁sentence｜>",),
    ),
    "command-r": Family(
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
        "{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'}[m.role] }}"
        "{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        (
            *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        ),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>2+2?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>4<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>3+3?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        opening=("<BOS_TOKEN>",),
    ),
    "glm4": Family(
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
        "<|user|>",
        "[gMASK]<sop><|user|>\n2+2?<|assistant|>\n4<|user|>\n3+3?<|assistant|>\n",
        opening=("[gMASK]", "<sop>"),
    ),
    "olmo2": Family(
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("<|endoftext|>",),
        "<|endoftext|>",
        "<|endoftext|><|user|>\n2+2?\n<|assistant|>\n4<|endoftext|>\n<|user|>\n3+3?\n<|assistant|>\n",
        opening=("<|endoftext|>",),
    ),
    "granite": Family(
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        "<|start_of_role|>user<|end_of_role|>2+2?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>4<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>3+3?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "falcon": Family(
        "{% for m in messages %}{{ '\n\n' if not loop.first }}{{ m.role | capitalize }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}",
        ("<|endoftext|>",),
        "<|endoftext|>",
        "User: 2+2?\n\nAssistant: 4\n\nUser: 3+3?\n\nAssistant:",
    ),
    "gpt-oss": Family(
        "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|return|>",
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>3+3?<|end|><|start|>assistant",
    ),
}


def save_tokenizer(
    family: Family, directory: Path, *, bytes_of: str = "", **changes: str | None
) -> PreTrainedTokenizerFast:
    """Write a tokenizer of bytes with the family's special tokens. ``bytes_of``: a text that it has one token for."""
    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in (*family.special, family.end)])
    if bytes_of:
        tokenizer.add_tokens([AddedToken(bytes_of, normalized=False)])
    if family.opening:
        opening = [(one, tokenizer.token_to_id(one)) for one in family.opening]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=[*family.opening, "$A"], special_tokens=opening),
            ]
        )
    given: dict[str, str | None] = {"eos_token": family.end, "bos_token": (*family.opening, None)[0]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=family.template, **given | changes)
    fast.save_pretrained(directory)
    return fast
