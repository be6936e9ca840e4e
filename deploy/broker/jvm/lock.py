"""Resolves Kafka's jars with jgo and prints the lock: coordinate, SHA-256 and size in bytes, one jar a line.

Run when Kafka's version changes: ``python -m deploy.broker.jvm.lock > new.lock``, then move it to ``kafka.lock`` here.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

from jgo.maven import MavenContext

from deploy.broker.jvm.jars import KAFKA_VERSION

# kafka-clients is named because jgo would otherwise settle on an older one that the broker does not start with.
ROOTS = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-clients:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j2-impl:2.25.1",
)


def locked_lines(repository: Path) -> list[str]:
    """The lock's lines, sorted; jars and poms are downloaded into ``repository``."""
    context = MavenContext(repo_cache=repository)
    inputs, transitive = context.resolver.resolve([context.create_dependency(root) for root in ROOTS])
    needed = [*inputs, *(each for each in transitive if each.scope in ("compile", "runtime"))]
    lines = []
    for artifact in (each.artifact for each in needed):
        content = artifact.resolve().read_bytes()
        coordinate = f"{artifact.groupId}:{artifact.artifactId}:{artifact.version}"
        lines.append(f"{coordinate} {hashlib.sha256(content).hexdigest()} {len(content)}")
    return sorted(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write("\n".join(locked_lines(Path(scratch))) + "\n")
