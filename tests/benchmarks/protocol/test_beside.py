import sys
import time

import pytest

from benchmarks.protocol.beside import Audits

pytestmark = pytest.mark.processes


def test_audits_follow_one_another_and_the_one_cut_short_does_not_count() -> None:
    audits = Audits([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"])
    with audits.following_one_another():
        time.sleep(2.0)
    assert 1 <= len(audits.took_s) <= 6
    assert min(audits.took_s) >= 0.3
    with audits.following_one_another():
        pass
    assert len(audits.took_s) <= 6


def test_books_that_do_not_balance_are_an_error() -> None:
    audits = Audits([sys.executable, "-S", "-c", "raise SystemExit(4)"])
    with pytest.raises(RuntimeError, match="exit code 4"), audits.following_one_another():
        time.sleep(1.0)
