"""A language model that trains anywhere: 110,000 random parameters and one token for each letter and digit."""

from pathlib import Path

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789?"


def build(directory: Path) -> Path:
    """Write the model and its tokenizer as ``from_pretrained`` reads them; return the directory."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # No token of padding, which a model of random weights would sample, though it has no text.
    vocabulary = {"<eos>": 0, **{character: 1 + i for i, character in enumerate(ALPHABET)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>").save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory
