"""Whether model, tokenizer and engine are there, and whether prompts and completions fit. Loads no weights."""

from collections.abc import Sequence
from math import prod

from consumers.training.model import resolve_device
from deploy.settings.tree import Settings
from deploy.starting.checks.check import Check
from producers.generation.engines.choice import build_engine
from producers.generation.engines.facts import UNLIMITED, ModelFacts, read_facts
from producers.generation.engines.slots.model import check_reach
from producers.generation.tokenizer import ModelTokenizer
from schemas.messages.prompts import Prompt


def check_model(facts: ModelFacts, path: str) -> Check:
    """Its family, size and context."""
    positions = "unlimited positions" if facts.max_length == UNLIMITED else f"{facts.max_length} positions"
    family = ", ".join(getattr(facts.config, "architectures", None) or [type(facts.config).__name__])
    size = f"{parameters(facts) / 1e6:.3g} million parameters"
    return Check("model", "ok", f"{path}: {family}, {size}, vocabulary {facts.vocab_size}, {positions}")


def read_model(settings: Settings) -> ModelFacts:
    """What its configuration says.

    Raises:
        ModelError: there is no such model.
    """
    return read_facts(settings.model.path, settings.generation.max_model_len)


def parameters(facts: ModelFacts) -> int:
    """Numbers in the weights, tied ones once."""
    return sum(prod(tensor.shape) for name, tensor in facts.tensors.items() if tensor.owner == name)


def check_lengths(settings: Settings, prompts: Sequence[Prompt], facts: ModelFacts) -> list[Check]:
    """Renders the prompts as a worker does and compares their lengths with the settings' and the model's.

    Raises:
        ModelError: there is no tokenizer, or no chat template although prompts are chats.
    """
    tokenizer = ModelTokenizer(settings.model.path)
    lengths = [len(tokenizer.encode_prompt(prompt)) for prompt in prompts]
    loop, longest = settings.loop, max(lengths)
    which = prompts[lengths.index(longest)].prompt_id
    said = f"{min(lengths)} to {longest} tokens in {len(lengths)} prompts"
    checks = [Check("lengths", "ok", f"{said}, at most {loop.max_prompt_length} allowed")]
    if longest > loop.max_prompt_length or longest >= facts.max_length:
        bound = min(loop.max_prompt_length, facts.max_length - 1)
        advice = "raise loop.max_prompt_length" if longest < facts.max_length else "take a model with more positions"
        long_ones = sum(length > bound for length in lengths)
        detail = f"{long_ones} of {len(lengths)} prompts have more than {bound} tokens, {which} has {longest}"
        checks = [
            Check("lengths", "fail", f"{detail}: they would end in error; {advice}, or leave them out by data.filter")
        ]
    if 0 in lengths:
        checks.append(Check("lengths", "fail", f"{prompts[lengths.index(0)].prompt_id} has no tokens; leave it out"))
    room = facts.max_length - longest
    if 0 < room < loop.max_completion_length:
        cut = f"after {which} only {room} of loop.max_completion_length = {loop.max_completion_length} tokens fit"
        checks.append(Check("lengths", "note", f"{cut} into the model's {facts.max_length} positions"))
    return checks


def check_engine(settings: Settings, facts: ModelFacts | None) -> Check:
    """Whether the engine is installed and takes the model, and the devices asked for are there.

    Raises:
        ModelError: one of it is not so.
    """
    build_engine(settings.generation, settings.model.path)
    if facts is not None and settings.generation.engine == "transformers":
        check_reach(settings.model.path, facts)
    resolve_device(settings.training.model_copy(update={"device": settings.generation.device}))
    device = resolve_device(settings.training)
    return Check("engine", "ok", f"{settings.generation.engine} is installed; training on {device}")
