"""Opens the data, which reads every stored row, and takes the first prompts of the run's own order."""

from collections.abc import Sequence, Sized

from deploy.settings.tree import Settings
from deploy.starting.checks.check import Check
from producers.prompts.sources.source import open_source
from schemas.messages.prompts import Prompt

SAMPLED = 64
SHOWN = 60


def sample_prompts(settings: Settings) -> list[Prompt]:
    """Prompts at the first positions.

    Raises:
        UserError: there are none to be had.
    """
    source = open_source(settings.data, run_seed=settings.run.seed)
    total = len(source) if isinstance(source, Sized) else settings.data.size
    return [source.prompt_at(position)[0] for position in range(min(SAMPLED, total))]


def check_prompts(prompts: Sequence[Prompt]) -> Check:
    """What the first of them is, and which columns the rewards get."""
    first = prompts[0]
    text = first.text if len(first.text) <= SHOWN else first.text[:SHOWN] + "…"
    columns = ", ".join(sorted(first.columns)) or "none"
    return Check("data", "ok", f"every row can be read; {first.prompt_id} is {text!r}; columns for rewards: {columns}")
