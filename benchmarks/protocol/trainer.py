"""``python -m benchmarks.protocol.trainer CONFIG PHASE MARKS [OVERRIDES]``: a trainer with the switch in it."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from benchmarks.protocol.switched import Switch, switched
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.consumers.training.trainer import Trainer
from streamrl.deploy.wiring.trainer import trainer_context
from streamrl.inspection.process import tune_garbage_collector
from streamrl.observability.role_context import ProcessContext
from streamrl.settings.loading import load_settings


@dataclass
class Stopwatch:
    """What the trainer has spent: seconds on the clock and of its processor time, after each step and on checkpoints.

    ``steps``: clock, processor, and of the step's checkpoint, if there was one, clock and processor.
    """

    switch: Switch
    steps: list[tuple[float, float, float, float]] = field(default_factory=list)
    _before: tuple[float, float] = (0.0, 0.0)
    _checkpoint: tuple[float, float] = (0.0, 0.0)

    def failpoint(self, point: Failpoint) -> None:
        """What the trainer calls at its points."""
        now = time.perf_counter(), time.process_time()
        if point is Failpoint.REPORT_MADE:
            self._before = now
        elif point is Failpoint.ROWS_SETTLED and not self.switch.is_on(len(self.steps) + 1):
            self._before = now  # a plain checkpoint waits for nothing
        elif point is Failpoint.CHECKPOINT_WRITTEN:
            self._checkpoint = now[0] - self._before[0], now[1] - self._before[1]
        elif point is Failpoint.METRICS_WRITTEN:
            self.steps.append((*now, *self._checkpoint))
            self._checkpoint = (0.0, 0.0)


def main(config: str, phase: str, marks: str, *overrides: str) -> None:
    """Train, then write what was spent."""
    settings = load_settings(Path(config), list(overrides))
    stopwatch = Stopwatch(Switch(int(phase)))
    context, _ = trainer_context(settings, ProcessContext("trainer", KafkaBus(settings.kafka)))
    context = replace(switched(context, int(phase), settings.run.path / "plain"), failpoint=stopwatch.failpoint)
    tune_garbage_collector()
    uvloop.run(Trainer(context).run(asyncio.Event()))
    Path(marks).write_text(json.dumps(stopwatch.steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
