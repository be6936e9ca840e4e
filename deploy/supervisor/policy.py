"""When a dead process is started again, and when the run gives up. Pure; time is passed in."""

from dataclasses import dataclass, field
from enum import StrEnum

from schemas.errors import Superseded, UserError


class Verdict(StrEnum):
    """What to do about a process that ended."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give_up"


@dataclass
class RestartPolicy:
    """Exponential back-off (0.5 s doubling to 15 s), forgotten after a minute of health.

    Invariant a_crash_loop_ends: more than ``max_restarts`` crashes without a healthy minute between them end the run.
    """

    max_restarts: int
    healthy_after_s: float = 60.0
    crashes: int = field(default=0, init=False)

    def judge(self, exit_code: int, ran_for_s: float) -> Verdict:
        """The verdict on an exit. Exit codes of user errors and of a superseded process are final."""
        if exit_code == 0:
            return Verdict.DONE
        if exit_code in (UserError.exit_code, Superseded.exit_code):
            return Verdict.GIVE_UP
        self.crashes = 1 if ran_for_s >= self.healthy_after_s else self.crashes + 1
        return Verdict.RESTART if self.crashes <= self.max_restarts else Verdict.GIVE_UP

    def delay_s(self) -> float:
        """How long to wait before the next start."""
        return float(min(15.0, 0.5 * 2 ** max(0, self.crashes - 1)))
