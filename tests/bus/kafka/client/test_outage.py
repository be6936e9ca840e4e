import pytest
from structlog.testing import capture_logs

from bus.kafka.connection import Outage, advised
from schemas.errors import BusError, BusUnavailable, StreamRLError, TopicMissing


def test_an_outage_is_told_once_and_so_is_its_end() -> None:
    outage = Outage("b:1", "start it again")
    with capture_logs() as logs:
        outage.end("reader")
        for _ in range(2):
            for client in ("reader", "other"):
                outage.begin(client, BusUnavailable("no answer"))
            for client in ("reader", "other"):
                outage.end(client)
    assert [each["event"] for each in logs] == [
        "the broker at b:1 does not answer; start it again",
        "the broker at b:1 answers again",
    ] * 2
    assert {each["log_level"] for each in logs} == {"warning"}
    assert logs[0]["error"] == "no answer"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BusUnavailable("no answer"), "no answer; start it"),
        (TopicMissing("no topic"), "no topic"),
        (BusError("refused"), "refused"),
    ],
)
def test_only_a_silent_broker_gets_the_advice(error: StreamRLError, text: str) -> None:
    assert advised(error, "start it") == text
    assert advised(error, "") == str(error)
