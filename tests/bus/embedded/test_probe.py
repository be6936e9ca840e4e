"""The metadata answer and the choice of ports."""

import socket
import struct

import pytest

from bus.embedded.node import free_ports, is_free, live_brokers, parse_brokers


def broker(node_id: int, rack: bytes | None = None) -> bytes:
    end = struct.pack(">h", -1) if rack is None else struct.pack(">h", len(rack)) + rack
    return struct.pack(">ih", node_id, 9) + b"127.0.0.1" + struct.pack(">i", 9092) + end


def test_broker_ids_are_read_with_and_without_racks() -> None:
    answer = struct.pack(">ii", 1, 3) + broker(1) + broker(7, b"a") + broker(3) + struct.pack(">ii", 1, 0)
    assert parse_brokers(answer) == {1, 3, 7}


@pytest.mark.parametrize("length", range(30))
def test_a_cut_answer_is_an_error_not_a_wrong_list(length: int) -> None:
    with pytest.raises(OSError, match="cut short"):
        parse_brokers((struct.pack(">ii", 1, 2) + broker(1) + broker(2))[:length])


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
