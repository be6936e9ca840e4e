"""The scripts of ``.ci``, which is no package, as modules."""

import importlib.util
from types import ModuleType

from tests.architecture.sources import ROOT


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


can_set_up = _script("can_set_up")
release = _script("release")
