"""Secret settings: which settings are secret, the mask that replaces a secret in written settings, and its use.

Invariants:
- secrets_are_never_parsed_as_toml: a secret is taken as text, whether a file, a variable or the command line gives it;
- a_mask_is_refused_as_a_secret: the error names the environment variable to set to the real secret.
"""

from collections.abc import Iterable
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import SecretStr

from streamrl.schemas.errors import SettingsError

ENV_PREFIX = "STREAMRL_"
MASK = "**********"
"""The text that pydantic writes for a SecretStr of any length."""


def variable_of(key: Iterable[str]) -> str:
    """The environment variable of a setting: ``STREAMRL_RUN__NAME`` for ``("run", "name")``."""
    return ENV_PREFIX + "__".join(key).upper()


def is_secret(annotation: Any) -> bool:
    """Whether a setting of this type is a secret."""
    return annotation is SecretStr or SecretStr in get_args(annotation)


def without_credentials(url: str | None) -> str | None:
    """The URL unchanged, since URLs are written and shown in full.

    Raises:
        ValueError: the URL contains a user or a password.
    """
    if url is not None and "@" in urlsplit(url).netloc:
        raise ValueError("expected a URL without a user or password, got one with; pass them by environment variables")
    return url


def secret_value(secret: SecretStr | None, *key: str) -> str | None:
    """The secret itself, for the library that needs it.

    Raises:
        SettingsError: the value is only the mask.
    """
    refuse_mask(secret, *key)
    return None if secret is None else secret.get_secret_value()


def refuse_mask(secret: SecretStr | None, *key: str, origin: str = "") -> None:
    """Refuse a mask as the value of a secret setting.

    Raises:
        SettingsError: the value is only the mask.
    """
    if secret is not None and secret.get_secret_value() == MASK:
        raise SettingsError(
            f"expected a value for {'.'.join(key)}, got the asterisks that replace a secret in files{origin}: set "
            f"{variable_of(key)} to the real one"
        )
