"""`streamrl run --dry-run`: what can go wrong before a run starts, as a checklist. Starts nothing that stays."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from deploy.settings.tree import Settings
from deploy.starting.checks.check import Check
from schemas.errors import StreamRLError

Tell = Callable[[str], None]
Result = TypeVar("Result")
Found = Check | Sequence[Check]
Act = Callable[[], Found | Coroutine[Any, Any, Sequence[Check]]]


class Checklist:
    """Lines told as they come; a check that raises is a failed line, and the others go on."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.checks: list[Check] = []

    def add(self, *checks: Check) -> None:
        """Tell lines."""
        self.checks += checks
        for check in checks:
            self._tell(str(check))

    def attempt(self, subject: str, act: Callable[[], Result]) -> Result | None:
        """What ``act`` returns, or None after a line that says why there is nothing."""
        try:
            return act()
        except StreamRLError as error:
            self.add(Check(subject, "fail", str(error)))
        except Exception as error:
            self.add(Check(subject, "fail", f"{type(error).__name__}: {error}"))
        return None

    def run(self, subject: str, act: Act) -> None:
        """Carry out a check, which may be asynchronous."""

        def finished() -> Found:
            result = act()
            return asyncio.run(result) if isinstance(result, Coroutine) else result

        result = self.attempt(subject, finished)
        if result is not None:
            self.add(*([result] if isinstance(result, Check) else result))


def dry_run(settings: Settings, tell: Tell) -> int:
    """Check everything; 0, or 2 if something would go wrong."""
    emulated = settings.generation.engine == "emulated"
    checklist = Checklist(tell)
    checklist.add(Check("settings", "ok", f"run {settings.run.name}, in {settings.run.path}/"))
    prompts = _prompts(checklist, settings)
    size = 0 if emulated else _model(checklist, settings, prompts)
    if prompts and not emulated:
        from deploy.starting.checks.rewards import check_rewards

        checklist.run("rewards", lambda: check_rewards(settings, prompts[0]))
    _surroundings(checklist, settings, size)
    tell(outcome(checklist.checks))
    return 2 if any(check.state == "fail" for check in checklist.checks) else 0


def outcome(checks: Sequence[Check]) -> str:
    """The last line: how many checks ended how, and which of them are worth a look."""
    by_state = {state: [check.subject for check in checks if check.state == state] for state in ("ok", "note", "fail")}
    parts = [f"{len(by_state['ok'])} ok"]
    if notes := by_state["note"]:
        parts.append(f"{len(notes)} note{'s' * (len(notes) > 1)} ({_once(notes)})")
    if failed := by_state["fail"]:
        parts.append(f"{len(failed)} failed ({_once(failed)})")
    return f"{len(checks)} checks: {', '.join(parts)}; nothing was started"


def _once(subjects: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(subjects))


def _prompts(checklist: Checklist, settings: Settings) -> list[Any]:
    from deploy.starting.checks.prompts import check_prompts, sample_prompts

    prompts = checklist.attempt("data", lambda: sample_prompts(settings)) or []
    if prompts:
        checklist.run("data", lambda: check_prompts(prompts))
    return prompts


def _model(checklist: Checklist, settings: Settings, prompts: list[Any]) -> int:
    """Parameters of the model; 0 if it cannot be had."""
    from deploy.starting.checks import model

    facts = checklist.attempt("model", lambda: model.read_model(settings))
    if facts is not None:
        checklist.run("model", lambda: model.check_model(facts, settings.model.path))
        if prompts:
            checklist.run("lengths", lambda: model.check_lengths(settings, prompts, facts))
    checklist.run("engine", lambda: model.check_engine(settings, facts))
    return 0 if facts is None else model.parameters(facts)


def _surroundings(checklist: Checklist, settings: Settings, parameters: int) -> None:
    from deploy.starting.checks.broker import check_broker
    from deploy.starting.checks.places import check_places
    from schemas.import_path import load_function

    if function := settings.evaluation.function:
        checklist.run("evaluation", lambda: _loaded(function, load_function))
    checklist.run("broker", lambda: check_broker(settings))
    checklist.run("places", lambda: check_places(settings, parameters))


def _loaded(path: str, load: Callable[[str], Any]) -> Check:
    load(path)
    return Check("evaluation", "ok", f"{path} can be imported")
