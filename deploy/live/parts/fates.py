"""What became of the newest trajectories: waiting, trained in a step, or skipped; and how old they were then."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

KEPT = 20_000
Place = tuple[int, int]


@dataclass
class Fates:
    """By partition and offset; the oldest are forgotten."""

    oldest: OrderedDict[Place, int] = field(default_factory=OrderedDict)
    told: OrderedDict[Place, str] = field(default_factory=OrderedDict)

    def arrived(self, place: Place, oldest_number: int) -> None:
        """A trajectory came whose oldest weights have this number."""
        self.oldest[place] = oldest_number
        if len(self.oldest) > KEPT:
            self.oldest.popitem(last=False)

    def tell(self, place: Place, fate: str) -> None:
        """Its end."""
        self.told[place] = fate
        if len(self.told) > KEPT:
            self.told.popitem(last=False)

    def trained(self, places: Iterable[Place], step: int, base: int) -> Iterator[int]:
        """These were trained in a step that improved weights number ``base``; the ages of those that were seen."""
        for place in places:
            self.tell(place, f"trained in step {step}")
            number = self.oldest.pop(place, None)
            if number is not None:
                yield base - number

    def of(self, place: Place, *, over: bool = False) -> str:
        """As text. ``over``: the run is finished, so that nothing waits any more."""
        return self.told.get(place, "left over" if over else "waiting")
