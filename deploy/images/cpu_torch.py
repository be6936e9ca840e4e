"""``python cpu_torch.py TORCH``: takes CUDA out of an installed torch, for an image that runs on processors alone.

PyPI has one build of torch for x86, and it is linked against CUDA: the libraries that it needs take five times its own
room. Here its CUDA half is deleted, and in the place of every library that the rest is linked against, and that is not
installed, comes a small one of the same name with the symbols that are asked for: functions of CUDA say that there is
no driver, and torch's own raise a RuntimeError. torch then finds no device, as on any machine without one. Nothing that
computes on a processor is touched. A build that has no CUDA half (PyTorch's own index has one) is left as it is.

Part of an image's build; it needs ``nm``, ``readelf`` and ``gcc``, and imports nothing but the standard library.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CUDA_HALF = "libtorch_cuda.so"
ONLY_CUDA = (CUDA_HALF, "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
"""The rest of torch is linked against the first alone, and opens the others when a device is used."""
MESSAGE = "this image has torch without CUDA; use the image of Dockerfile.vllm on a GPU"
NO_DRIVER = 35
"""cudaErrorInsufficientDriver, what CUDA says where there is none; to the callers of other libraries, some error."""
_SPECIAL = {
    # Asked as torch is loaded, for the place in which to put a function.
    "_ZN4c10d15get_gil_checkerEv": "void **_ZN4c10d15get_gil_checkerEv(void) { static void *place; return &place; }",
    # One is made as torch is loaded, as the default of an argument: Python asks its class, and copies nothing of it.
    "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": (
        "void _ZN4c10d16ProcessGroupNCCL7OptionsC1Eb(void **self) {\n"
        '    static const char name[] = "N4c10d16ProcessGroupNCCL7OptionsE";\n'
        "    static void *of_class[2] = {0, (void *)name}, *functions[66] = {[2 ... 65] = (void *)nothing};\n"
        "    of_class[0] = &_ZTVN10__cxxabiv117__class_type_infoE[2], functions[1] = of_class, *self = &functions[2];\n"
        "}"
    ),
    "cudaGetErrorName": 'const char *cudaGetErrorName(int code) { return "cudaErrorInsufficientDriver"; }',
    "cudaGetErrorString": f'const char *cudaGetErrorString(int code) {{ return "{MESSAGE}"; }}',
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *version) { return *version = 0; }",
    "cuptiGetResultString": (
        f'int cuptiGetResultString(int code, const char **text) {{ *text = "{MESSAGE}"; return 0; }}'
    ),
}
_HEAD = """\
/* What a C++ caller can catch; torch's own code makes a Python exception of it. */
extern void _ZSt21__throw_runtime_errorPKc(const char *) __attribute__((noreturn));
extern void *_ZTVN10__cxxabiv117__class_type_infoE[];
static void nothing(void) {}
"""
VIRTUAL_FUNCTIONS = 64
"""No class of these has more; nothing is ever made of them."""


@dataclass
class Missing:
    """A library to make: its symbols, and the version under which they are asked for, if any."""

    symbols: set[str] = field(default_factory=set)
    version: str = ""


def missing_libraries(kept: Iterable[Path]) -> dict[str, Missing]:
    """By name: what the kept libraries need of others that are neither among them nor on this system."""
    kept = [*kept]
    there = {path.name for path in kept}
    needed = {name for path in kept for name in re.findall(r"NEEDED.*\[(.+)\]", _tool("readelf", "-d", str(path)))}
    # Most of what is asked for of the system has no version either, so whatever it defines is left to it.
    system = {name: Path(path) for name, path in re.findall(r"^\t(\S+) .* => (.+)$", _tool("ldconfig", "-p"), re.M)}
    found = [*kept, *(system[name] for name in needed & system.keys())]
    defined = {symbol.partition("@")[0] for path in found for symbol in _symbols(path, "--defined-only")}
    missing = {name: Missing() for name in sorted(needed - there - system.keys())}
    for path in kept:
        for symbol in _symbols(path, "--undefined-only"):
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if version in missing:
                missing[version].symbols.add(name)
                missing[version].version = version
            # Without a version nothing says whose it is, and any library that is loaded will do.
            elif not (version or name in defined or name.startswith(("Py", "_Py"))):
                missing.setdefault(CUDA_HALF, Missing()).symbols.add(name)
    return missing


def source_of(symbols: Iterable[str]) -> str:
    """A library in C with these symbols."""
    return _HEAD + "".join(f"{_definition(symbol)}\n" for symbol in sorted(symbols))


def _definition(symbol: str) -> str:
    if symbol in _SPECIAL:
        return _SPECIAL[symbol]
    kind, name = symbol[:4], symbol[4:]
    # A class that is named, though no object of it exists: what typeid() and a constructor's code refer to.
    if kind == "_ZTI":
        return (
            f'static const char name_{symbol}[] = "{name}";\n'
            f"void *{symbol}[2] = {{&_ZTVN10__cxxabiv117__class_type_infoE[2], (void *)name_{symbol}}};"
        )
    if kind == "_ZTV":
        return f"void *{symbol}[{VIRTUAL_FUNCTIONS}] = {{0, 0, [2 ... {VIRTUAL_FUNCTIONS - 1}] = (void *)nothing}};"
    if symbol.startswith("_Z"):
        return f'void {symbol}(void) {{ _ZSt21__throw_runtime_errorPKc("{MESSAGE} ({symbol})"); }}'
    return f"long {symbol}(void) {{ return {NO_DRIVER}; }}"


def make(library: Path, content: Missing) -> None:
    """Compile one library.

    Raises:
        CalledProcessError: the compiler refuses it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "library.c"), Path(scratch, "versions")
        source.write_text(source_of(content.symbols))
        command = ["gcc", "-shared", "-fPIC", "-fexceptions", "-O1", "-w", f"-Wl,-soname,{library.name}"]
        if content.version:
            versions.write_text(f"{content.version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run([*command, "-o", str(library), str(source)], check=True)


def without_cuda(torch: Path) -> Mapping[str, Missing]:
    """Take CUDA out of the torch of this directory; what was put in the place of which library."""
    libraries = torch / "lib"
    half = [path for name in ONLY_CUDA if (path := libraries / name).exists()]
    if not half:
        return {}
    for path in half:
        path.unlink()
    kept = [*sorted(libraries.glob("*.so*")), *sorted(torch.glob("*.so"))]
    missing = missing_libraries(kept)
    for name, content in missing.items():
        make(libraries / name, content)
    return missing


def _symbols(path: Path, which: str) -> set[str]:
    # Weak ones that nobody defines are allowed to stay so.
    lines = (line.split() for line in _tool("nm", "-D", which, str(path)).splitlines())
    return {parts[-1] for parts in lines if len(parts) > 1 and parts[-2] not in ("w", "v")}


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(torch: str) -> None:
    """Say what was done."""
    made = without_cuda(Path(torch))
    for name, content in made.items():
        print(f"{name}: {len(content.symbols)} symbols, none of them of use")
    if not made:
        print("this torch has no CUDA")


if __name__ == "__main__":
    main(*sys.argv[1:])
