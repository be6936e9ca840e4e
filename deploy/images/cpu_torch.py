"""``python cpu_torch.py TORCH``: removes CUDA from an installed torch, for an image that runs only on CPUs.

PyPI's only build of torch for x86 is linked against CUDA libraries that are five times as large as torch itself. This
script deletes torch's CUDA libraries. The rest of torch is linked against libraries that are then missing. For each of
them the script compiles a small replacement with the same name and the required symbols. In it, CUDA's functions report
that there is no driver, and torch's own functions raise a RuntimeError. So torch finds no device, as on any machine
without one. Code that computes on the CPU is not changed. A build without CUDA, such as the one in PyTorch's own index,
is left unchanged.

The script is part of an image's build. It needs ``nm``, ``readelf`` and ``gcc``, and imports only the standard library.
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
"""The rest of torch is linked only against the first one, and opens the others when a device is used."""
MESSAGE = "this image has torch without CUDA; use the image of Dockerfile.vllm on a GPU"
NO_DRIVER = 35
"""cudaErrorInsufficientDriver, CUDA's error without a driver; callers of other libraries take it for some error."""
_SPECIAL = {
    # Called while torch is loaded; it returns a place where the caller stores a function.
    "_ZN4c10d15get_gil_checkerEv": "void **_ZN4c10d15get_gil_checkerEv(void) { static void *place; return &place; }",
    # Called while torch is loaded, to make the default of an argument. Python asks for its class but copies nothing.
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
/* Throws an exception that a C++ caller can catch; torch's own code turns it into a Python exception. */
extern void _ZSt21__throw_runtime_errorPKc(const char *) __attribute__((noreturn));
extern void *_ZTVN10__cxxabiv117__class_type_infoE[];
static void nothing(void) {}
"""
VIRTUAL_FUNCTIONS = 64
"""Size of each virtual table. None of these classes has more functions, and no object of them is ever made."""


@dataclass
class Missing:
    """A library to compile: its symbols, and their required version if they have one."""

    symbols: set[str] = field(default_factory=set)
    version: str = ""


def missing_libraries(kept: Iterable[Path]) -> dict[str, Missing]:
    """Libraries that the kept ones need and that are neither among them nor on this system, by name."""
    kept = [*kept]
    kept_names = {path.name for path in kept}
    needed = {name for path in kept for name in re.findall(r"NEEDED.*\[(.+)\]", _tool("readelf", "-d", str(path)))}
    # Most symbols from system libraries have no version, so symbols that the system defines are not replaced.
    system = {name: Path(path) for name, path in re.findall(r"^\t(\S+) .* => (.+)$", _tool("ldconfig", "-p"), re.M)}
    found = [*kept, *(system[name] for name in needed & system.keys())]
    defined = {symbol.partition("@")[0] for path in found for symbol in _symbols(path, "--defined-only")}
    missing = {name: Missing() for name in sorted(needed - kept_names - system.keys())}
    for path in kept:
        for symbol in _symbols(path, "--undefined-only"):
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if version in missing:
                missing[version].symbols.add(name)
                missing[version].version = version
            # A symbol without a version may come from any loaded library, so it goes into torch's.
            elif not (version or name in defined or name.startswith(("Py", "_Py"))):
                missing.setdefault(CUDA_HALF, Missing()).symbols.add(name)
    return missing


def source_of(symbols: Iterable[str]) -> str:
    """C source of a library with these symbols."""
    return _HEAD + "".join(f"{_definition(symbol)}\n" for symbol in sorted(symbols))


def _definition(symbol: str) -> str:
    if symbol in _SPECIAL:
        return _SPECIAL[symbol]
    kind, name = symbol[:4], symbol[4:]
    # Type information of a class, which typeid() and constructors refer to although no object of it exists.
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
    """Compile a replacement library.

    Raises:
        CalledProcessError: the compiler fails.
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
    """Remove CUDA from the torch in this directory; returns the replacements by library name."""
    libraries = torch / "lib"
    cuda_libraries = [path for name in ONLY_CUDA if (path := libraries / name).exists()]
    if not cuda_libraries:
        return {}
    for path in cuda_libraries:
        path.unlink()
    kept = [*sorted(libraries.glob("*.so*")), *sorted(torch.glob("*.so"))]
    missing = missing_libraries(kept)
    for name, content in missing.items():
        make(libraries / name, content)
    return missing


def _symbols(path: Path, which: str) -> set[str]:
    # Weak symbols may stay undefined.
    lines = (line.split() for line in _tool("nm", "-D", which, str(path)).splitlines())
    return {parts[-1] for parts in lines if len(parts) > 1 and parts[-2] not in ("w", "v")}


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(torch: str) -> None:
    """Remove CUDA and print the replaced libraries."""
    replaced = without_cuda(Path(torch))
    for name, content in replaced.items():
        print(f"{name}: replaced, with {len(content.symbols)} symbols")
    if not replaced:
        print("this torch has no CUDA: nothing to remove")


if __name__ == "__main__":
    main(*sys.argv[1:])
