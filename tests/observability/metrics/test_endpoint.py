import json
import socket
import urllib.request
from pathlib import Path

import pytest

from streamrl.bus.embedded.node import free_ports
from streamrl.observability.metrics.endpoint import endpoint, first_port
from streamrl.observability.metrics.families import Meters
from streamrl.schemas.errors import UserError

HOST = "127.0.0.1"


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_figures_are_served_and_a_note_says_where(tmp_path: Path) -> None:
    (base,) = free_ports(1)
    meters, note = Meters("r"), tmp_path / "notes" / "r-trainer.json"
    meters.count("trainer_steps", "grpo", by=3)
    with endpoint(meters.registry, HOST, base - 2, "trainer", note) as port:
        text = read(port)
        assert 'streamrl_trainer_steps_total{algorithm="grpo",run="r"} 3.0' in text
        assert "process_resident_memory_bytes" in text
        assert "_created" not in text
        assert json.loads(note.read_text()) == [{"targets": [f"{HOST}:{port}"], "labels": {"process": "trainer"}}]
    assert not note.exists()
    with pytest.raises(OSError, match="refused"):
        read(port)


def test_a_taken_port_leads_to_the_next_one(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        base = taken.getsockname()[1]
        with endpoint(Meters("r").registry, HOST, base, "coordinator", tmp_path / "n.json") as port:
            assert base < port < base + 100


def test_an_address_that_is_not_ours_is_refused_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"metrics\.host"),
        endpoint(Meters("r").registry, "192.0.2.1", 20_000, "relay", tmp_path / "n.json"),
    ):
        pass


def test_processes_have_ports_of_their_own() -> None:
    names = ["coordinator", "relay", "trainer", "dispatcher", "ranker", "worker-0", "worker-1", "worker-17"]
    assert len({first_port(9464, name) for name in names}) == len(names)
