"""Asks a broker over its own protocol who is in the cluster, and finds ports for new ones. Knows no client library."""

import random
import socket
import struct

from deploy.broker.server_properties import HOST

# Below the range from which systems take the ports of outgoing connections: a port given to a node stays its own
# while the node is down, so that it can come back on it.
_PORTS = range(20_000, 32_000)
_METADATA_V1 = struct.pack(">hhih", 3, 1, 1, 5) + b"probe" + struct.pack(">i", 0)
_LARGEST_ANSWER = 1 << 20


def live_brokers(port: int, timeout_s: float = 2.0) -> frozenset[int]:
    """Ids of the brokers that the node at ``port`` knows to be alive; empty before it can serve clients.

    Sends Metadata v1 with no topics. Raises OSError when nothing answers there.
    """
    with socket.create_connection((HOST, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(struct.pack(">i", len(_METADATA_V1)) + _METADATA_V1)
        (length,) = struct.unpack(">i", _receive(connection, 4))
        if not 0 <= length <= _LARGEST_ANSWER:
            raise OSError(f"{HOST}:{port} does not speak Kafka's protocol")
        return parse_brokers(_receive(connection, length))


def parse_brokers(answer: bytes) -> frozenset[int]:
    """The broker ids of a Metadata v1 answer. Raises OSError when the bytes are not one."""
    try:
        _, count = struct.unpack_from(">ii", answer)
        position, ids = 8, set()
        for _ in range(count):
            node_id, host_length = struct.unpack_from(">ih", answer, position)
            position += 6 + host_length + 4
            (rack_length,) = struct.unpack_from(">h", answer, position)
            position += 2 + max(0, rack_length)
            ids.add(node_id)
    except struct.error as error:
        raise OSError("the answer to a Kafka metadata request is cut short") from error
    return frozenset(ids)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionResetError("the broker closed the connection")
        received += chunk
    return bytes(received)


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
        return True


def free_ports(count: int, but: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """``count`` different ports that were free a moment ago, none of them in ``but``."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        if port not in but and is_free(port):
            found.append(port)
    return tuple(found)
