"""An embedded broker with one more listener: SASL_SSL, for one user, under a certificate that was made for it."""

import datetime
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from streamrl.bus.embedded import node
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.node import HOST, NodeSpec, free_ports

USER = "streamrl"


@dataclass(frozen=True)
class SecureBroker:
    """Where it listens, the certificate to trust, and where it listens to anybody, as for a test that reads."""

    address: str
    certificate: Path
    plain: str


@contextmanager
def secure_broker(folder: Path, password: str) -> Iterator[SecureBroker]:
    """Of two lines for a property Kafka takes the later one: its configuration is as ever, with more behind it."""
    keystore, certificate = certified(folder)
    (port,) = free_ports(1)
    plain = node.server_properties

    def properties(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> str:
        text = plain(spec, cluster)
        written = dict(line.split("=", 1) for line in text.splitlines())
        more = {
            "listeners": f"{written['listeners']},SASL://{HOST}:{port}",
            "advertised.listeners": f"{written['advertised.listeners']},SASL://{HOST}:{port}",
            "listener.security.protocol.map": f"{written['listener.security.protocol.map']},SASL:SASL_SSL",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": (
                f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{password}";'
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keystore),
        }
        return text + "".join(f"{key}={value}\n" for key, value in more.items())

    with pytest.MonkeyPatch.context() as patch:
        # For this start alone: another test may start a broker of its own while this one serves.
        patch.setattr(node, "server_properties", properties)
        cluster = start_cluster(folder / "kafka", heap_mb=256)
    with cluster:
        yield SecureBroker(f"{HOST}:{port}", certificate, cluster.bootstrap_servers)


def certified(folder: Path, pass_phrase: str = "") -> tuple[Path, Path]:
    """A key with its certificate in one file, for the broker, and the certificate alone, for its clients."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a broker of the tests")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate = made.public_bytes(serialization.Encoding.PEM)
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, _encryption(pass_phrase))
    (folder / "broker.pem").write_bytes(key.private_bytes(*formats) + certificate)
    (folder / "ca.pem").write_bytes(certificate)
    return folder / "broker.pem", folder / "ca.pem"


def _encryption(pass_phrase: str) -> serialization.KeySerializationEncryption:
    if not pass_phrase:
        return serialization.NoEncryption()
    return serialization.BestAvailableEncryption(pass_phrase.encode())
