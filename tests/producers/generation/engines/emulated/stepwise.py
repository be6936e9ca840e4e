"""The same batching one step at a time, as plainly as it can be written: what the fast batch is judged against."""

import math
from dataclasses import dataclass, field

from streamrl.schemas.profiles import DecodeCurve


@dataclass
class Completion:
    arrival: float
    prompt: int
    length: int
    dropped_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    started: bool = False
    gone: bool = False
    finish: float | None = None
    admitted: int = 0
    place: int = 0


def simulate(
    curve: DecodeCurve, slots: int, completions: list[Completion], adoptions: list[float], *, recomputes: bool = False
) -> dict[int, float]:
    """Fills in ``finish`` and ``tokens`` (the version of each); when each adoption was over, by version from 1."""
    now, version, adopted = 0.0, 0, dict[int, float]()
    kv, entries, preempted = curve.settings.kv_tokens or math.inf, 0, 0

    def cached(one: Completion) -> int:
        return one.prompt + len(one.tokens)

    def held(runs: list[Completion]) -> int:
        return sum(map(cached, runs))

    while version < len(adoptions) or any(not one.gone for one in completions):
        while True:
            before = now
            for one in completions:
                if one.dropped_at is not None and one.dropped_at <= now:
                    one.gone = True
            while version < len(adoptions) and adoptions[version] <= before:
                version += 1
                now += curve.settings.adopt_s
                for one in completions if recomputes else ():
                    if one.started and not one.gone:
                        now += curve.settings.prefill_s + cached(one) * curve.settings.prefill_s_per_token
                adopted[version] = now
            for one in sorted(completions, key=lambda each: (each.place, each.arrival)):
                if one.started or one.gone:
                    continue
                busy = [each for each in completions if each.started and not each.gone]
                own = one.prompt + len(one.tokens)
                fits = not busy or held(busy) + own + len(busy) + 1 <= kv
                if not (one.arrival <= before and len(busy) < slots and fits):
                    break
                entries += 1
                one.started, one.admitted = True, entries
                now += curve.settings.prefill_s + own * curve.settings.prefill_s_per_token
            if now == before:
                break
        running = [one for one in completions if one.started and not one.gone]
        if not running:
            ahead = [one.arrival for one in completions if not one.started and not one.gone]
            drops = [one.dropped_at for one in completions if not one.gone and one.dropped_at is not None]
            news = [moment for moment in [*ahead, *drops, *adoptions[version:]] if moment > now]
            if not news:
                break
            now = min(news)
            continue
        running.sort(key=lambda one: one.admitted)
        while len(running) > 1 and held(running) + len(running) > kv:
            preempted += 1
            last = running.pop()
            last.started, last.place = False, -preempted
        context = len(running) * max(map(cached, running)) if curve.settings.padding_counts else held(running)
        now += curve.batch_s(len(running)) + curve.settings.context_s_per_token * context
        for one in running:
            one.tokens.append(version)
            if len(one.tokens) == one.length:
                one.finish, one.gone = now, True
    return adopted
