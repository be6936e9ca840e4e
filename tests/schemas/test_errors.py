import inspect

from schemas import errors


def test_every_error_is_one_of_ours_and_says_what_it_is() -> None:
    defined = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
    assert all(issubclass(each, errors.StreamRLError) and each.__doc__ for each in defined)
    listed = errors.__doc__ or ""
    assert all(each.__name__ in listed for each in defined)


def test_exit_codes_tell_a_supervisor_what_to_do() -> None:
    assert errors.StreamRLError.exit_code == errors.BusUnavailable.exit_code == 1
    assert errors.SettingsError.exit_code == errors.BrokerError.exit_code == 2
    assert errors.Superseded.exit_code == 3
    assert errors.DataLossRefused.exit_code == 4
