"""The demo's tokenizer: Qwen2's own, with no merges (so a token is a byte, a letter) and one long token.

The long token is the task's instruction, which never changes: a prompt is a fifth as long with it. A separator,
appended as other tokenizers append an end token, marks where the prompt ends and the answer begins; the model learns
to count letters from it several times faster.
"""

from typing import Any

from deploy.demo.task import INSTRUCTION

PAD, EOS, ANSWER = "<|pad|>", "<|endoftext|>", "<|answer|>"
SPECIAL = (PAD, EOS, ANSWER)


def build_tokenizer() -> Any:
    """A ``Qwen2Tokenizer`` without a beginning token, as Qwen2 has none; any text makes the round trip.

    ``transformers`` loads this class for a Qwen2 model whatever the directory says, so nothing else would load right.
    """
    from tokenizers import AddedToken, pre_tokenizers, processors
    from transformers import Qwen2Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate((*SPECIAL, *letters))}
    tokenizer = Qwen2Tokenizer(
        vocab=ids,
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[ANSWER],
        padding_side="left",
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {ANSWER}", special_tokens=[(ANSWER, ids[ANSWER])]
    )
    tokenizer.add_tokens([AddedToken(INSTRUCTION, special=False, normalized=False)])
    return tokenizer
