"""When a dead process is started again, and when the run gives up. Pure; time and chance are passed in."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.errors import DataLossRefused, Superseded, UserError

PASSING_S = 6.0


class Verdict(StrEnum):
    """What to do about a process that ended."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give_up"


@dataclass
class RestartPolicy:
    """Exponential back-off (0.5 s doubling to 15 s, a quarter more or less), forgotten after a minute of health.

    Invariants:
    - a_crash_loop_ends: more than ``max_restarts`` crashes without a healthy minute between them end the run;
    - a_superseded_process_stays_away: two supervisors with a process of the same id do not end each other's for ever.
    """

    max_restarts: int
    healthy_after_s: float = 60.0
    chance: Callable[[], float] = random.random
    crashes: int = field(default=0, init=False)
    lives: int = field(default=0, init=False)
    _may_pass: bool = field(default=False, init=False)

    def judge(self, exit_code: int, ran_for_s: float) -> Verdict:
        """The verdict on an exit.

        A superseded process and one that refuses to lose data stay away. A user error is final in the first life; in
        a later one the same settings worked before, so it is something that may pass, such as a broker that is away.
        """
        self.lives += 1
        if exit_code == 0:
            return Verdict.DONE
        if exit_code in (Superseded.exit_code, DataLossRefused.exit_code):
            return Verdict.GIVE_UP
        if exit_code == UserError.exit_code and self.lives == 1:
            return Verdict.GIVE_UP
        self._may_pass = exit_code == UserError.exit_code
        self.crashes = 1 if ran_for_s >= self.healthy_after_s else self.crashes + 1
        return Verdict.RESTART if self.crashes <= self.max_restarts else Verdict.GIVE_UP

    def delay_s(self) -> float:
        """How long to wait before the next start; longer for what may pass, so that a broker has time to come back."""
        doubled = 0.5 * (1 << min(10, max(0, self.crashes - 1)))
        return min(15.0, max(doubled, PASSING_S if self._may_pass else 0.0)) * (0.75 + 0.5 * self.chance())
