"""What the configuration text promises for one node and for three."""

from pathlib import Path

import pytest

from bus.embedded.node import NodeSpec, server_properties


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
