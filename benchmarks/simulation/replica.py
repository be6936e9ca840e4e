"""One generation replica in closed form: continuous batching with a bounded key-value cache. Pure; virtual seconds.

The same rules as the emulated engine's batch (``producers/generation/engines/emulated.py``), to which the tests hold
it, at a tenth of the cost: thousands of replicas with a thousand completions each go from one completion's end to the
next, in no matter how many decode steps. What happens in between takes effect at the next boundary of a step.
"""

import math
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from streamrl.schemas.profiles import DecodeCurve

NEVER = math.inf
HEADROOM = 0.01
"""Share of the cache that is given up at once when it is full: an event for some steps in place of one for each."""
_entries = count(1)
"""Of all replicas: a completion that moved must not be taken for one that is still here."""
WATERMARK = 0.01
"""Share of the cache that no new completion may take, as in vLLM's block manager: it keeps those that run from giving
up their caches at once."""


class Completion:
    """``length`` tokens behind a prompt of ``prompt``; ``made``: of those, sampled before it was last admitted.

    ``group``: what it belongs to; samples of a group that are admitted together are prefilled once. ``began_at`` and
    ``ended_at``: virtual seconds, None before. ``expected``: its length as dispatch was told.
    """

    __slots__ = ("began_at", "ended_at", "entry", "expected", "first_step", "group", "length", "made", "prompt")

    def __init__(self, prompt: int, length: int, group: Any = None, expected: int = 0) -> None:
        self.prompt, self.length, self.group, self.expected = prompt, length, group, expected or length
        self.made = 0
        self.first_step = 0
        self.entry = 0
        self.began_at: float | None = None
        self.ended_at: float | None = None

    def end(self) -> float:
        """When it ended; it must have."""
        assert self.ended_at is not None, "expected a completion that has ended"
        return self.ended_at


class Replica:
    """``slots`` completions at once within ``kv_tokens``; steps by ``curve``, which has prefill and adoption too.

    Use: ``sync(t)`` brings it to the first boundary at or after t, changes follow, ``settle`` ends them; ``next_at`` is
    when ``fire`` is due, which returns the completions that ended.
    ``version``: number of the weights that it samples with.

    Sums since the beginning: ``busy_s`` with something running, ``kv_s`` share of the cache in use × seconds,
    ``tokens`` sampled, ``prefilled`` tokens of prompts and of contexts computed again, ``stalled_s``.
    """

    def __init__(
        self,
        number: int,
        curve: DecodeCurve,
        slots: int,
        kv_tokens: int,
        watermark: float = WATERMARK,
        headroom: float = HEADROOM,
    ) -> None:
        self.number, self.curve, self.slots, self.kv_tokens = number, curve, slots, kv_tokens
        self._admits_to = round(kv_tokens * (1 - watermark))
        self._kept_to = round(kv_tokens * (1 - headroom))
        # Looked up at every event: t(b) by batch, and what each token in the cache adds.
        self._batch_s = [curve.batch_s(max(1, batch)) for batch in range(slots + 1)]
        self._context_s = curve.settings.context_s_per_token
        self.concurrency = slots
        self.name = f"replica-{number:05}"
        self.at = 0.0
        self.next_at = NEVER
        self.steps = 0
        self.context = 0
        self.version = 0
        self.active: dict[Completion, None] = {}
        self._doubtful: list[tuple[int, int, Completion]] = []
        self._outgrown: set[Completion] = set()
        self.waiting: deque[Completion] = deque()
        self.busy_s = self.kv_s = self.stalled_s = 0.0
        self.tokens = self.prefilled = self.preempted = 0
        self.used_before = 0.0
        self.stamp = 0
        self._expected = self._prompts = 0
        self._due: list[tuple[int, int, Completion]] = []
        self._planned = 0
        self._stall_s = 0.0

    @property
    def load(self) -> int:
        """Completions that it has, running or waiting."""
        return len(self.active) + len(self.waiting)

    @property
    def expected_left(self) -> int:
        """Tokens that they are expected to lack, all together."""
        return max(0, self._expected - (self.context - self._prompts))

    def outgrown(self) -> set[Completion]:
        """Of those that run, which are past what was expected of them."""
        doubtful = self._doubtful
        while doubtful and doubtful[0][0] <= self.steps:
            _, entry, completion = heappop(doubtful)
            if entry == completion.entry:
                self._outgrown.add(completion)
        return self._outgrown

    def left_of(self, completion: Completion) -> int:
        """Tokens that a running completion still lacks."""
        return completion.first_step + completion.length - self.steps

    def made_of(self, completion: Completion) -> int:
        """Tokens that a running completion has."""
        return self.steps - completion.first_step

    def sync(self, now: float) -> None:
        """To the boundary at which a change of this moment takes effect."""
        running = len(self.active)
        if not running:
            self.at = max(self.at, now)
        elif self.at < now and self._planned:
            steps = min(self._planned, self.curve.steps_until(now, self.at, running, self.context))
            self._decode(steps)
            self._planned -= steps

    def fire(self) -> list[Completion]:
        """What is due at ``next_at``: completions end, others begin."""
        self._decode(self._planned)
        self._planned = 0
        ended = self._ended()
        self.settle()
        return ended

    def run_out(self) -> list[Completion]:
        """All that it has, to the end, with nobody coming; what ended, in that order."""
        if not self.active and len(self.waiting) <= self.concurrency and (found := self._run_out_at_once()):
            return found
        self.settle()
        ended: list[Completion] = []
        while self.next_at < NEVER:
            ended += self.fire()
        return ended

    def _run_out_at_once(self) -> list[Completion]:
        """The same as a sum over the ends, where all run from the start on; nothing if they do not fit into the cache.

        With lengths in ascending order and n of them, the steps from one end to the next are a batch of n - i.
        """
        by_length = sorted(self.waiting, key=lambda one: one.length - one.made)
        count = len(by_length)
        lengths = np.array([one.length - one.made for one in by_length], float)
        contexts = np.array([one.prompt + one.made for one in by_length], float)
        left = np.arange(count, 0, -1)
        before = np.concatenate([[0.0], lengths[:-1]])
        # Of those that are still there, the caches they began with; each has grown by one token a step.
        began_with = np.cumsum(contexts[::-1])[::-1]
        if count and (began_with + left * lengths).max() + count + 1 > self._admits_to:
            return []
        steps, held = lengths - before, began_with + left * before
        seconds = steps * (np.array(self._batch_s)[left] + self._context_s * (held + left * (steps - 1) / 2))
        groups = {one.group: one for one in reversed(self.waiting) if one.group is not None and not one.made}
        prefilled = [*groups.values(), *(one for one in self.waiting if one.made or one.group is None)]
        stall_s = sum(self.curve.prefill_s(one.prompt + one.made) for one in prefilled)
        ends = (self.at + stall_s + np.cumsum(seconds)).tolist()
        for completion, end in zip(by_length, ends, strict=True):
            completion.began_at = self.at if completion.began_at is None else completion.began_at
            completion.ended_at, completion.made = end, completion.length
        if count:
            self.stalled_s += stall_s
            self.busy_s += ends[-1] - self.at
            self.kv_s += stall_s * began_with[0] / self.kv_tokens
            self.kv_s += float((seconds * (held + left * steps / 2)).sum()) / self.kv_tokens
            self.tokens += int(lengths.sum())
            self.prefilled += sum(one.prompt for one in prefilled)
            self.steps += int(lengths[-1])
            self.at = ends[-1]
        self.waiting.clear()
        self._expected = 0
        return by_length

    def offer(self, completions: Iterable[Completion]) -> None:
        """Completions ask for slots, in this order."""
        for completion in completions:
            self.waiting.append(completion)
            self._expected += completion.expected

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Give these up, with what they have; they can be offered to another replica."""
        taken = []
        for completion in completions:
            if completion in self.active:
                self._leave(completion)
            else:
                self.waiting.remove(completion)
            self._expected -= completion.expected
            taken.append(completion)
        return taken

    def adopt(self, version: int, stall_s: float, *, prefill_again: bool = False) -> None:
        """Sample with these weights from here on; caches are kept, or computed again with the new weights."""
        self.version = version
        self._stall_s += stall_s
        if prefill_again:
            self._stall_s += sum(self.curve.prefill_s(one.prompt + self.made_of(one)) for one in self.active)
            self.prefilled += self.context

    def settle(self) -> None:
        """After a change: who may begin begins, and the next event is reckoned."""
        due = self._due
        while due and due[0][1] != due[0][2].entry:
            heappop(due)
        # Whoever has all its tokens leaves before others come in.
        if not due or due[0][0] > self.steps:
            self._admit()
        running = len(self.active)
        if self._stall_s:
            self.at += self._stall_s
            self.stalled_s += self._stall_s
            if running:
                self.busy_s += self._stall_s
                self.kv_s += self._stall_s * self.context / self.kv_tokens
            self._stall_s = 0.0
        if not running:
            self.next_at = NEVER
            return
        if running > 1 and self.context + running > self.kv_tokens:
            while running > 1 and self.context + running > self._kept_to:
                self._preempt()
                running -= 1
        while due[0][1] != due[0][2].entry:
            heappop(due)
        steps = due[0][0] - self.steps
        if running > 1:
            steps = min(steps, max(1, (self.kv_tokens - self.context) // running)) if steps else 0
        self._planned = steps
        self.next_at = self.at + self._leg_s(steps, running)

    def _leg_s(self, steps: int, running: int) -> float:
        """``DecodeCurve.leg_s`` from here on."""
        held = self.context + running * (steps - 1) / 2
        return steps * (self._batch_s[running] + self._context_s * held)

    def _decode(self, steps: int) -> None:
        if not steps:
            return
        running = len(self.active)
        seconds = self._leg_s(steps, running)
        grown = running * steps
        self.at += seconds
        self.busy_s += seconds
        self.kv_s += seconds * (self.context + grown / 2) / self.kv_tokens
        self.steps += steps
        self.context += grown
        self.tokens += grown

    def _ended(self) -> list[Completion]:
        due, ended = self._due, []
        while due and due[0][0] <= self.steps:
            _, entry, completion = heappop(due)
            if entry == completion.entry:
                self._leave(completion)
                self._expected -= completion.expected
                completion.ended_at = self.at
                ended.append(completion)
        return ended

    def _leave(self, completion: Completion) -> None:
        del self.active[completion]
        self._outgrown.discard(completion)
        made = self.steps - completion.first_step
        self.context -= completion.prompt + made
        self._prompts -= completion.prompt
        completion.made = made
        completion.entry = 0

    def _preempt(self) -> None:
        completion = next(reversed(self.active))
        self._leave(completion)
        self.waiting.appendleft(completion)
        self.preempted += 1

    def _admit(self) -> None:
        waiting, running = self.waiting, len(self.active)
        prefilled = set()
        while waiting and running < self.concurrency:
            completion = waiting[0]
            own = completion.prompt + completion.made
            # As vLLM does: there is room for its tokens and for a step of all; an empty batch takes whatever comes.
            if running and self.context + own + running + 1 > self._admits_to:
                break
            waiting.popleft()
            completion.first_step = self.steps - completion.made
            if completion.began_at is None:
                completion.began_at = self.at
            self.active[completion] = None
            running += 1
            self.context += own
            self._prompts += completion.prompt
            completion.entry = entry = next(_entries)
            heappush(self._due, (completion.first_step + completion.length, entry, completion))
            if completion.expected < completion.length:
                heappush(self._doubtful, (completion.first_step + completion.expected, entry, completion))
            # Of the samples of a prompt one is prefilled, unless they have tokens of their own.
            if completion.made or completion.group is None or completion.group not in prefilled:
                self._stall_s += self.curve.prefill_s(own)
                self.prefilled += own
            if not completion.made and completion.group is not None:
                prefilled.add(completion.group)
