"""The meters of one process: families made on first use, with the run's name in each. Knows not what is measured."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deploy.metrics.families import BY_NAME, PREFIX, RUN, Family

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


@dataclass
class Meters:
    """Only families that are named in the catalogue can be measured; labels are given in its order."""

    run: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _counters: dict[tuple[str, ...], Counter] = field(default_factory=dict)
    _gauges: dict[tuple[str, ...], Gauge] = field(default_factory=dict)
    _histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)
    _families: dict[str, Counter | Gauge | Histogram] = field(default_factory=dict)
    _heard: dict[tuple[str, ...], float] = field(default_factory=dict)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter."""
        key = (name, *labels)
        if (counter := self._counters.get(key)) is None:
            counter = self._counters[key] = self._made(name, Counter).labels(self.run, *labels)
        counter.inc(by)

    def count_to(self, total: float, name: str, *labels: str) -> None:
        """Bring a counter to a total that something else counts; if that began anew, its count is added."""
        key = (name, *labels)
        before = self._heard.get(key, 0.0)
        self._heard[key] = total
        self.count(name, *labels, by=total - before if total >= before else total)

    def set(self, value: float, name: str, *labels: str) -> None:
        """Set a gauge."""
        key = (name, *labels)
        if (gauge := self._gauges.get(key)) is None:
            gauge = self._gauges[key] = self._made(name, Gauge).labels(self.run, *labels)
        gauge.set(value)

    def set_one_of(self, name: str, chosen: str, choices: tuple[str, ...], *labels: str) -> None:
        """Set the gauge of one choice to 1 and those of the others to 0; the choice is the last label."""
        for choice in choices:
            self.set(float(choice == chosen), name, *labels, choice)

    def observe(self, value: float, name: str, *labels: str) -> None:
        """Add a value to a histogram."""
        key = (name, *labels)
        if (histogram := self._histograms.get(key)) is None:
            histogram = self._histograms[key] = self._made(name, Histogram).labels(self.run, *labels)
        histogram.observe(value)

    def forget(self, name: str) -> None:
        """Drop all label values of a gauge that will be set anew."""
        self._gauges = {key: gauge for key, gauge in self._gauges.items() if key[0] != name}
        if name in self._families:
            self._families[name].clear()

    def _made(self, name: str, kind: type[Metric]) -> Metric:
        known = self._families.get(name)
        if known is None:
            family: Family = BY_NAME[name]
            labels = (RUN, *family.labels)
            more: dict[str, Any] = {"buckets": family.buckets} if family.buckets else {}
            known = self._families[name] = kind(PREFIX + name, family.help, labels, registry=self.registry, **more)
        assert isinstance(known, kind), f"{name} is a {BY_NAME[name].kind}"
        return known
