from pathlib import Path

from streamrl.inspection.report.gathering import adoptions, joined


def test_stretches_that_touch_are_one() -> None:
    assert joined([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0), (2.0, 2.5), (3.0, 4.0)]) == ((1.0, 4.0), (5.0, 6.0))
    assert joined([]) == ()


def test_many_stretches_are_joined_to_the_nearest_until_they_are_few() -> None:
    found = joined([(float(at), at + 0.9) for at in range(1000)] + [(5000.0, 5001.0)], most=10)
    assert found == ((0.0, 999.9), (5000.0, 5001.0))


def test_adoptions_are_read_from_a_log_file(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text(
        'timestamp=1970-01-01T00:00:10.5Z level=info event="weights adopted" version=1-7 run=r process=w worker=w\n'
        "Traceback (most recent call last):\n"
        'timestamp=never level=info event="weights adopted" version=1-8 run=r\n'
        'timestamp=1970-01-01T00:00:11Z level=info event="weights fetched" version=1-9 run=r\n'
    )
    assert adoptions(log) == ((10.5, "1-7"),)
    assert adoptions(tmp_path / "absent.log") == ()
    (tmp_path / "w.log.1").write_text(log.read_text().replace("10.5Z", "09Z").replace("1-7", "1-6"))
    (tmp_path / "w.log.10").write_text(log.read_text().replace("10.5Z", "01Z").replace("1-7", "1-5"))
    assert adoptions(log) == ((1.0, "1-5"), (9.0, "1-6"), (10.5, "1-7")), "of rotated logs, the oldest first"


def test_adopted_versions_of_an_arm_carry_its_name(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text('timestamp=1970-01-01T00:00:12Z level=info event="weights adopted" version=rloo-1/1-2 run=r\n')
    assert adoptions(log) == ((12.0, "rloo-1/1-2"),)
