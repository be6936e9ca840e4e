"""How often what goes wrong, and how long things take: drawn from the seed's own stream of chance."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class FaultRates:
    """Probabilities per event, and times in seconds. All zero: a perfect broker that answers at once.

    Of a send: ``request_lost`` never reaches the broker, ``ack_lost`` does, ``refused`` is turned away for want of a
    leader; the first two are tried again until ``delivery_timeout_s``. ``late``: of the sends that were given up
    without having arrived, the share that arrives all the same within ``latest_s``. Of a poll: ``slow_poll`` and
    ``empty_poll`` (as if nothing had come). Of a transaction: ``txn_unanswered`` (the end is lost, or its answer is)
    and ``txn_refused``.
    """

    latency_s: float = 0.0
    request_lost: float = 0.0
    ack_lost: float = 0.0
    refused: float = 0.0
    late: float = 0.0
    slow_poll: float = 0.0
    empty_poll: float = 0.0
    txn_unanswered: float = 0.0
    txn_refused: float = 0.0
    retry_s: float = 0.6
    delivery_timeout_s: float = 2.0
    latest_s: float = 8.0
    connect_timeout_s: float = 1.5
    txn_timeout_s: float = 10.0


PERFECT = FaultRates()


@dataclass
class Chances:
    """Draws; ``rates`` may be replaced while the simulation runs (the end of all faults)."""

    rates: FaultRates
    random: Random

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0.0 and self.random.random() < probability

    def latency(self) -> float:
        """Seconds of one way through the network; now and then ten times the usual."""
        usual = self.rates.latency_s
        if usual == 0.0:
            return 0.0
        draw = self.random.random()
        return usual * (10.0 * draw if draw > 0.97 else 0.2 + draw)
