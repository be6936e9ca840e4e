"""The demo's tokenizer: Qwen2's own, with no merges (so a token is a byte, a letter) and one long token.

The long token is the task's instruction, which never changes: a prompt is a fifth as long with it.
"""

from typing import Any

from deploy.demo.task import INSTRUCTION

PAD, EOS = "<|pad|>", "<|endoftext|>"


def build_tokenizer() -> Any:
    """A ``Qwen2Tokenizer``, without a beginning token as Qwen2 has none; any text makes the round trip.

    ``transformers`` loads this class for a Qwen2 model whatever the directory says, so nothing else would load right.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokens = (PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(INSTRUCTION, special=False, normalized=False)])
    return tokenizer
