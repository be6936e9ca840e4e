"""One node: what its configuration promises, how it is asked who serves, and the choice of ports."""

import socket
import struct
from pathlib import Path

import pytest

from streamrl.bus.embedded.node import (
    LiveBrokers,
    NodeSpec,
    free_ports,
    is_free,
    live_brokers,
    parse_brokers,
    reserved,
    server_properties,
)


def properties(nodes: int) -> list[dict[str, str]]:
    specs = tuple(NodeSpec(i + 1, 9092 + i, 19092 + i, Path(f"/data/node-{i + 1}")) for i in range(nodes))
    texts = (server_properties(spec, specs) for spec in specs)
    return [dict(line.split("=", 1) for line in text.splitlines()) for text in texts]


@pytest.mark.parametrize(("nodes", "replicas", "in_sync"), [(1, "1", "1"), (2, "2", "1"), (3, "3", "2"), (5, "3", "2")])
def test_internal_topics_are_replicated_as_far_as_the_nodes_allow(nodes: int, replicas: str, in_sync: str) -> None:
    for node in properties(nodes):
        assert {value for key, value in node.items() if key.endswith("replication.factor")} == {replicas}
        assert {value for key, value in node.items() if key.endswith((".min.isr", "min.insync.replicas"))} == {in_sync}


def test_nothing_listens_beyond_loopback() -> None:
    for node in properties(3):
        listeners = node["listeners"].split(",") + node["advertised.listeners"].split(",")
        assert all(listener.split("://")[1].startswith("127.0.0.1:") for listener in listeners)


def test_all_nodes_name_the_same_voters_and_none_shares_a_port() -> None:
    nodes = properties(3)
    assert {node["controller.quorum.voters"] for node in nodes} == {
        "1@127.0.0.1:19092,2@127.0.0.1:19093,3@127.0.0.1:19094"
    }
    ports = [listener.rsplit(":", 1)[1] for node in nodes for listener in node["listeners"].split(",")]
    assert len(ports) == len(set(ports)) == 6


def broker(node_id: int, rack: bytes | None = None) -> bytes:
    end = struct.pack(">h", -1) if rack is None else struct.pack(">h", len(rack)) + rack
    return struct.pack(">ih", node_id, 9) + b"127.0.0.1" + struct.pack(">i", 9092) + end


def test_broker_ids_are_read_with_and_without_racks() -> None:
    brokers = struct.pack(">ii", 1, 3) + broker(1) + broker(7, b"a") + broker(3)
    assert parse_brokers(brokers + struct.pack(">h3sii", 3, b"c-1", 1, 0)) == LiveBrokers("c-1", frozenset({1, 3, 7}))
    assert parse_brokers(brokers + struct.pack(">hii", -1, 1, 0)).cluster_id is None


def test_a_cut_answer_is_an_error_not_a_wrong_list() -> None:
    whole = struct.pack(">ii", 1, 2) + broker(1) + broker(2) + struct.pack(">h3s", 3, b"c-1")
    for length in range(len(whole)):
        with pytest.raises(OSError, match="cut short"):
            parse_brokers(whole[:length])


def test_a_server_that_speaks_another_protocol_is_not_a_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            server.settimeout(1)
            with pytest.raises(OSError):
                live_brokers(server.getsockname()[1], timeout_s=0.2)


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    with socket.create_server(("127.0.0.1", ports[0])):
        assert not is_free(ports[0])
    assert is_free(ports[1])
    assert not is_free(70_000)


def test_a_reserved_port_is_usable_only_by_its_own_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, other = free_ports(2)
    monkeypatch.setattr("streamrl.bus.embedded.node._PORTS", (port, other))
    with reserved(port):
        for _ in range(2):  # it comes back while connections of the one before linger
            assert is_free(port)
            assert free_ports(2) == (other,)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
            with socket.create_server(("127.0.0.1", port)) as server:  # sets SO_REUSEADDR
                client = socket.create_connection(("127.0.0.1", port))
                server.accept()[0].close()
                client.close()
    assert set(free_ports(2)) <= {port, other}
