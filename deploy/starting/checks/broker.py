"""Whether the named broker answers and takes our topics, or one can be started here. Changes nothing."""

from deploy.broker import detached
from deploy.broker.jvm.jars import KAFKA_VERSION, MEGABYTE, missing_jars
from deploy.broker.jvm.java import find_java
from deploy.broker.runtime import cache_root
from deploy.bus.topic_admin import diff_topics
from deploy.settings.tree import Settings
from deploy.starting.checks.check import Check


async def check_broker(settings: Settings) -> list[Check]:
    """The broker that the run would use.

    Raises:
        BrokerError: it does not answer, or there is no Java to start one.
    """
    if settings.kafka.bootstrap_servers is None:
        found = detached.status(detached.default_data_dir())
        if not found.running:
            return [_embedded()]
        address = found.bootstrap_servers
    else:
        address = settings.kafka.bootstrap_servers
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    partitions = settings.loop.trajectory_partitions
    changes = await diff_topics(address, settings.run.name, partitions, kafka.replication_factor, kafka)
    conflicts = [change for change in changes if change.kind == "conflict"]
    if conflicts:
        return [Check("broker", "fail", f"{address}: {change}") for change in conflicts]
    return [Check("broker", "ok", f"{address} answers; topics to create or change: {len(changes)}")]


def _embedded() -> Check:
    java = find_java()
    missing = missing_jars(cache_root() / "runtime" / f"kafka-{KAFKA_VERSION}" / "jars")
    if missing:
        size = sum(jar.size for jar in missing) // MEGABYTE
        return Check(
            "broker", "note", f"Kafka {KAFKA_VERSION} would be downloaded first: {len(missing)} jars, {size} MB"
        )
    return Check("broker", "ok", f"none named: Kafka {KAFKA_VERSION} would be started here, on Java {java.version}")
