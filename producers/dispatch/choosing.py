"""The port through which the dispatcher asks whether to order a prompt, and the answers of a run that orders all."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from streamrl.bus.port import Bus
from streamrl.schemas.trajectories import FinishedCompletion, OrderingChance, Prompt


class Decision(NamedTuple):
    """Whether a prompt is ordered, and the chance to put into its order; None: every prompt is ordered."""

    is_ordered: bool
    chance: OrderingChance | None


class PromptChooser(Protocol):
    """Decides which drawn prompts are ordered, by what earlier groups earned. Pure but for ``recall``."""

    def observe(self, sample: FinishedCompletion) -> None:
        """Apply one sample of this run with all its rewards; repeats change nothing."""
        ...

    def decide(self, position: int, prompt: Prompt, version: int) -> Decision:
        """Whether to order the prompt at a position, with the trainer at a version of this number."""
        ...

    async def recall(self, bus: Bus, run: str, on_poll: Callable[[], None]) -> None:
        """Apply the samples that the topics hold of this run and of earlier ones; ``on_poll`` is called at each poll.

        Raises:
            BusUnavailable: the broker does not answer, or the topics do not exist.
        """
        ...


class EveryPrompt:
    """The answers of a run that orders every prompt."""

    def observe(self, sample: FinishedCompletion) -> None:
        """See ``PromptChooser``: nothing is remembered."""

    def decide(self, position: int, prompt: Prompt, version: int) -> Decision:
        """See ``PromptChooser``: it is ordered."""
        return Decision(is_ordered=True, chance=None)

    async def recall(self, bus: Bus, run: str, on_poll: Callable[[], None]) -> None:
        """See ``PromptChooser``: nothing is read."""
