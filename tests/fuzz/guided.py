"""The child process of ``tests.fuzz.run``: one target under atheris. Arguments: the target, then libFuzzer's."""

import atexit
import importlib
import sys

atheris = importlib.import_module("atheris")

with atheris.instrument_imports(include=["schemas", "streamrl.schemas.messages", "streamrl.bus.kafka"]):
    from tests.fuzz.targets import TARGETS, forget_peak, memory_kib


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    target = TARGETS[sys.argv.pop(1)]
    target(b"")
    forget_peak()
    before = memory_kib("VmRSS")

    def tell() -> None:
        print(f"memory: {before} KiB before, {memory_kib('VmHWM')} KiB at most", file=sys.stderr, flush=True)

    atexit.register(tell)
    calls = 0

    def once(data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls % 5000 == 0:
            tell()
        target(data)

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
