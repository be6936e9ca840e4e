"""Puts the trace id into log lines that name a group or a trajectory of a sampled trace."""

from dataclasses import dataclass, field
from typing import Any

import structlog

from deploy.telemetry.context import Context
from deploy.telemetry.memory import Memory


@dataclass
class LoggedTraces:
    """A structlog processor; without a noted group it changes nothing."""

    _by_group: Memory[str, str] = field(default_factory=Memory)

    def note(self, group_id: str, context: Context) -> None:
        """This group is traced."""
        self._by_group.put(group_id, context.trace)

    def __call__(self, _logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Add ``trace_id``."""
        if len(self._by_group) and (group := _group_of(event)) and (trace := self._by_group.get(group)):
            event.setdefault("trace_id", trace)
        return event


def _group_of(event: structlog.typing.EventDict) -> str:
    trajectory = event.get("trajectory")
    return str(trajectory).rpartition("/")[0] if trajectory else str(event.get("group", ""))
