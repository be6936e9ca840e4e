"""The configuration of a run without a model, and the one that several tests look at."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.pipeline.local_run import LocalRun
from tests.pipeline.secure_broker import USER, SecureBroker, secure_broker

NAME = "emulated-test"
HELD_OUT = (
    "--evaluation.data.held_out.dataset=chain_sum",
    "--evaluation.data.held_out.seed=777",
    "--evaluation.every=2",
    "--evaluation.prompts=6",
    "--evaluation.samples=2",
)
"""Options for an evaluation of steps 0, 2 and 4; each of them, unless it is slower than the steps."""
CONFIG = """
[run]
directory = "{directory}"
name = "{name}"
workers = 2
[data]
dataset = "chain_sum"
[loop]
groups_per_step = 8
num_generations = 4
max_staleness = 1
max_completion_length = 3000
bucket_boundaries = [500, 1000]
[generation]
engine = "emulated"
max_num_seqs = 16
[training]
backend = "emulated"
max_steps = 4
[emulation]
time_scale = 50.0
[emulation.decode]
adopt_s = 0.5
chunk_tokens = 400
[emulation.training]
forward_backward_s_per_token = 1e-4
"""
LOGIN = """
[kafka]
bootstrap_servers = "{broker.address}"
security_protocol = "SASL_SSL"
sasl_plain_username = "{user}"
sasl_plain_password = "{password}"
ssl_cafile = "{broker.certificate}"
"""
PASSWORD = "20240101"  # TOML would make a number of it


@dataclass
class EmulatedRun(LocalRun):
    """``servers``: where anybody may read its topics; ``seen``: the command lines of its processes."""

    config: Path = Path()
    servers: str = ""
    seen: set[str] = field(default_factory=set)

    @classmethod
    def to_its_end(cls, config: Path, broker: SecureBroker, *options: str) -> "EmulatedRun":
        """Start it, and look on until it has come to its good end."""
        run = cls(**vars(LocalRun.start(config, NAME, *options)), config=config, servers=broker.plain)
        try:
            while run.process.poll() is None:
                run.seen |= _command_lines(run.process.pid)
                time.sleep(0.3)
            assert run.wait() == 0, run.text()[-4000:]
        finally:
            run.end()
        return run


def _command_lines(parent: int) -> set[str]:
    try:
        below = psutil.Process(parent).children(recursive=True)
        return {" ".join(child.cmdline()) for child in below}
    except psutil.Error:  # one of them ended meanwhile
        return set()


@contextmanager
def emulated_run_in(directory: Path) -> Iterator[EmulatedRun]:
    """A run that logs in at its broker, is traced and evaluates; it is over, and its broker goes on until the end."""
    config = directory / "emulated.toml"
    with secure_broker(directory, PASSWORD) as broker:
        login = LOGIN.format(broker=broker, user=USER, password=PASSWORD)
        config.write_text(CONFIG.format(directory=directory, name=NAME) + login)
        yield EmulatedRun.to_its_end(config, broker, "--telemetry.traces=file", *HELD_OUT)
