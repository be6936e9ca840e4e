"""A simulated run around the admission ledger: workers that lag, a trainer, and a dispatcher that hears of it later."""

from collections import deque
from dataclasses import dataclass

from streamrl.consumers.ingest.sampling import Window
from streamrl.producers.dispatch.admission import AdmissionLedger
from streamrl.schemas.identifiers import PolicyVersion

MOVES = (
    *("admit", "admit", "adopt", "heartbeat", "sample", "finish", "finish", "finish", "take", "take", "take"),
    *("hear", "hear", "hear_produced", "hear_produced", "move", "skip"),
)


def v(number: int, lineage: int = 1) -> PolicyVersion:
    return PolicyVersion(lineage, number)


@dataclass
class _Group:
    index: int
    worker: int
    due_step: int
    oldest: int | None = None
    done: bool = False


class SimulatedAdmission:
    """Samples come in any order. The trainer takes whole groups oldest first, and checks their age as ingest does.

    With ``fixed`` batches it leaves those that are for a later step. ``takes``: "freshest", or "any", takes them in
    that order out of ingest's window.
    """

    def __init__(
        self, groups_per_step: int, max_staleness: int, workers: int, *, fixed: bool = False, takes: str = "oldest"
    ) -> None:
        self.takes = takes
        self.size, self.bound = groups_per_step, max_staleness
        self.ledger = AdmissionLedger(groups_per_step, max_staleness, has_fixed_batches=fixed)
        self.version = v(0)
        self.actual = [v(0)] * workers
        self.reported = [v(0)] * workers
        self.groups: dict[str, _Group] = {}
        self.batch: dict[str, _Group] = {}
        self.taken: list[tuple[int, str, _Group]] = []
        self.news: deque[tuple[PolicyVersion, tuple[str, ...]] | tuple[str, int]] = deque([(v(0), ())])
        self.produced: deque[str] = deque()
        self.admitted = self.stale = self.oldest_trained = 0

    def admit(self, worker: int) -> bool:
        if not self.ledger.may_admit(self.reported[worker]):
            return False
        self.admitted += 1
        self.groups[f"g{self.admitted}"] = _Group(self.admitted, worker, self.ledger.next_due)
        self.ledger.admit(f"g{self.admitted}", self.reported[worker])
        return True

    def adopt(self, worker: int) -> None:
        self.actual[worker] = max(self.actual[worker], self.version)

    def heartbeat(self, worker: int) -> None:
        self.reported[worker] = self.actual[worker]

    def sample(self, choice: int, *, finish: bool) -> None:
        """One group in four is slow: it gets its turn only with one choice in five."""
        names = [
            name for name, group in self.groups.items() if not group.done and (choice % 5 == 0 or group.index % 4 != 1)
        ]
        if names:
            name = names[choice % len(names)]
            group = self.groups[name]
            number = self.actual[group.worker].number
            group.oldest = number if group.oldest is None else min(group.oldest, number)
            group.done = finish
            if finish:
                self.produced.append(name)

    def move(self, choice: int, worker: int) -> None:
        if running := [name for name, group in self.groups.items() if not group.done]:
            name = running[choice % len(running)]
            if self.ledger.may_move(name, self.reported[worker]):
                self.ledger.move(name, self.reported[worker])
                self.groups[name].worker = worker

    def skip(self, choice: int) -> None:
        """The trainer refuses any group that it has read."""
        if ready := self._ready():
            self._end(ready[choice % len(ready)])

    def take(self) -> bool:
        """The oldest whole group goes into the batch; true if that completed a step."""
        if not (ready := self._ready()):
            return False
        name = ready[0] if self.takes == "oldest" else self._chosen(ready)
        age = max(0, self.version.number - (self.groups[name].oldest or 0))
        if age > self.bound:
            self.stale += 1
            self._end(name)
            return False
        self.oldest_trained = max(self.oldest_trained, age)
        self.batch[name] = self.groups.pop(name)
        return len(self.batch) == self.size and self._step()

    def _chosen(self, ready: list[str]) -> str:
        window = Window[str](self.size, keeps_places=True)
        for name in ready:
            oldest = self.groups[name].oldest or 0
            liking = -oldest if self.takes == "freshest" else self.groups[name].index * 7919 % 101
            window.push(name, oldest + self.bound + 1, (liking, name))
        return window.pop(self.version.number + 1, self.size - len(self.batch))

    def train(self) -> bool:
        """One step, if enough whole groups are there."""
        while self._ready():
            if self.take():
                return True
        return False

    def resume(self, back: int) -> None:
        """The trainer comes back with an older checkpoint and reads everything since then again."""
        number = max(0, self.version.number - back)
        self.version = v(number, self.version.lineage + 1)
        self.groups |= self.batch | {name: group for at, name, group in self.taken if at > number}
        self.batch = {}
        self.taken = [entry for entry in self.taken if entry[0] <= number]
        self.news.append((self.version, ()))

    def hear(self) -> None:
        """The dispatcher reads of a step or a skip."""
        if self.news:
            first, second = self.news.popleft()
            if isinstance(first, str):
                self.ledger.end(first, second)  # type: ignore[arg-type]
            else:
                self.ledger.advance(first, second)  # type: ignore[arg-type]

    def hear_produced(self) -> None:
        """The dispatcher reads the last sample of a group; steps and skips may have come before it or not."""
        if self.produced:
            self.ledger.produced(self.produced.popleft())

    def hear_all(self) -> None:
        while self.news or self.produced:
            self.hear()
            self.hear_produced()

    def supply(self) -> None:
        """Everything that workers and dispatcher owe happens at once."""
        self.hear_all()
        for worker in range(len(self.actual)):
            self.adopt(worker)
            self.heartbeat(worker)
            while self.admit(worker):
                pass
        while any(not group.done for group in self.groups.values()):
            self.sample(0, finish=True)
        self.hear_all()

    def settle(self) -> None:
        """Everything that is due happens."""
        self.supply()
        self.train()

    def play(self, moves: list[tuple[str, int]]) -> None:
        for move, choice in moves:
            match move:
                case "admit" | "adopt" | "heartbeat":
                    getattr(self, move)(choice % len(self.actual))
                case "sample" | "finish":
                    self.sample(choice, finish=move == "finish")
                case "move":
                    self.move(choice, choice % len(self.actual))
                case "skip":
                    self.skip(choice)
                case "resume":
                    self.resume(choice % 4)
                case _:
                    getattr(self, move)()

    def _ready(self) -> list[str]:
        """Whole groups for the step to come, those that were for an earlier one first."""
        due = self.version.number + 1
        names = (name for name, group in self.groups.items() if group.done and group.due_step <= due)
        return sorted(names, key=lambda name: (self.groups[name].due_step, self.groups[name].index))

    def _end(self, name: str) -> None:
        self.taken.append((self.version.number, name, self.groups.pop(name)))
        self.news.append((name, self.version.number))

    def _step(self) -> bool:
        self.version = v(self.version.number + 1, self.version.lineage)
        self.taken += [(self.version.number, name, group) for name, group in self.batch.items()]
        self.news.append((self.version, tuple(self.batch)))
        self.batch = {}
        return True
