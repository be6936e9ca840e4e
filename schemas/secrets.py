"""Secret settings: which they are, the mask that stands for one wherever settings are written, and its way to a use.

Invariants:
- a_secret_is_taken_literally: whatever layer gives it, it is text, never TOML;
- a_mask_is_no_secret: what stands for a secret in a file is refused as one, with the variable that gives the real one.
"""

from collections.abc import Iterable
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import SecretStr

from streamrl.schemas.errors import SettingsError

ENV_PREFIX = "STREAMRL_"
MASK = "**********"
"""What pydantic writes for a SecretStr, whatever its length."""


def variable_of(key: Iterable[str]) -> str:
    """The environment variable of a setting: ``("kafka", "linger_ms")`` as ``STREAMRL_KAFKA__LINGER_MS``."""
    return ENV_PREFIX + "__".join(key).upper()


def is_secret(annotation: Any) -> bool:
    """Whether a setting of this type is a secret."""
    return annotation is SecretStr or SecretStr in get_args(annotation)


def without_credentials(url: str | None) -> str | None:
    """The address itself, if nobody's name or password is in it: it is written and shown as it stands.

    Raises:
        ValueError: there is one.
    """
    if url is not None and "@" in urlsplit(url).netloc:
        raise ValueError("expected a URL without a user or password, got one with; give them by the environment")
    return url


def revealed(secret: SecretStr | None, *key: str) -> str | None:
    """The secret itself, for the library that needs it.

    Raises:
        SettingsError: only its mask is there.
    """
    refuse_mask(secret, *key)
    return None if secret is None else secret.get_secret_value()


def refuse_mask(secret: SecretStr | None, *key: str, origin: str = "") -> None:
    """Check that a setting has its own value.

    Raises:
        SettingsError: only its mask is there.
    """
    if secret is not None and secret.get_secret_value() == MASK:
        raise SettingsError(
            f"expected a value for {'.'.join(key)}, got the asterisks that stand for a secret in files{origin}: set "
            f"{variable_of(key)} to the real one"
        )
