import errno
import inspect
from collections.abc import Callable

import pytest

from streamrl.schemas import errors
from streamrl.schemas.errors import causes_of, is_disk_full_error
from streamrl.schemas.import_path import is_import_race


def test_every_error_is_one_of_ours_and_says_what_it_is() -> None:
    defined = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
    assert all(issubclass(each, errors.StreamRLError) and each.__doc__ for each in defined)


def test_exit_codes_tell_a_supervisor_what_to_do() -> None:
    assert errors.StreamRLError.exit_code == errors.BusUnavailable.exit_code == 1
    assert errors.SettingsError.exit_code == errors.BrokerError.exit_code == 2
    assert errors.Superseded.exit_code == 3
    assert errors.DataLossRefused.exit_code == 4


def _raised_from_itself() -> Exception:
    """A cycle of two errors, each raised from the other."""
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.timeout(10)
@pytest.mark.parametrize("question", [is_disk_full_error, is_import_race])
def test_a_circle_of_causes_is_gone_through_once(question: Callable[[BaseException], bool]) -> None:
    circle = _raised_from_itself()
    assert [str(each) for each in causes_of(circle)] == ["first", "second"]
    assert not question(circle)


def test_the_causes_of_an_error_leave_out_errors_that_were_only_being_handled() -> None:
    handled, cause, error = KeyError("handled"), OSError("cause"), ValueError("error")
    error.__cause__, error.__context__, cause.__context__ = cause, TypeError("as well"), handled
    assert [*causes_of(error)] == [error, cause]
    assert [*causes_of(error, with_context=True)] == [error, cause, handled]
    assert [*causes_of(None)] == []


@pytest.mark.parametrize(
    "bottom", [OSError(errno.ENOSPC, "full"), errors.DiskFull("full"), RuntimeError("write failed (os error 28)")]
)
def test_an_error_lacks_room_if_one_that_it_comes_from_does(bottom: Exception) -> None:
    top = errors.WeightsError("not written")
    assert not is_disk_full_error(top)
    top.__context__ = bottom
    assert not is_disk_full_error(top)
    top.__cause__ = bottom
    assert is_disk_full_error(top)
