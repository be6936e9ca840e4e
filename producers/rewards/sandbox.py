"""Confinement of a reward process: its environment, its limits, and whether it has a network.

A reward reads, and may run, text that a model wrote. Invariants:
- reward_processes_get_no_secrets: of the worker's environment they get the variables that programs need, and those that
  the user names;
- limits_are_set_before_user_code_runs: the process sets them itself before it imports user code. They cannot be raised
  again, except by root, which a worker should not be.

Removing the network and counting processes need a user namespace of Linux. In a namespace, a process has its own empty
network, in which even loopback is down, and its own count of processes. It can read neither memory nor environment of
processes in another namespace, even if these belong to the same user.
"""

import ctypes
import errno
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.schemas.errors import RewardLoadError

PASSED_ON = frozenset(
    {
        # paths of programs, libraries and the user's files; locale and time zone
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        # numbers of threads, and visible devices
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"),
        *("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "HIP_VISIBLE_DEVICES"),
        # caches of models, which judges may use
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE"),
        *("XDG_CACHE_HOME", "TORCH_HOME", "NLTK_DATA"),
    }
)
"""Variables that every reward process gets: none of them is known to contain a credential."""
PASSED_ON_PREFIXES = ("LC_", "PYTHON")
REWARD_DEVICES = "STREAMRL_REWARD_DEVICES"
"""Variable of a worker's environment: the CUDA devices of its reward processes, which are not its own. It is not a
setting of the run, because it differs between workers."""

# From the kernel's headers sched.h, prctl.h and capability.h.
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 4, 8, 38, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_FILE_CAPABILITIES = (0, 1, 2, 3)  # CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER
_NOBODY = 65534


@dataclass(frozen=True)
class RewardConfinement:
    """Limits of one reward process and of all processes that it starts; None: no additional limit.

    ``max_file_bytes`` is the size of one file. Its default stops a function that fills the disk by mistake.

    ``network_setting``: the setting that removes the network, for messages.
    """

    network: bool = True
    max_processes: int | None = None
    max_memory_bytes: int | None = None
    max_file_bytes: int = 16 << 30
    max_open_files: int = 4096
    network_setting: str = "rewards.network"


def environment_for(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The environment of a reward process: the variables of ``environ`` that programs need, and those of ``names``.

    If the worker's environment names devices for rewards, the process sees these, unless ``names`` has
    CUDA_VISIBLE_DEVICES.
    """
    named = frozenset(names)
    wanted = PASSED_ON | named
    found = {name: value for name, value in environ.items() if name in wanted or name.startswith(PASSED_ON_PREFIXES)}
    if REWARD_DEVICES in environ and "CUDA_VISIBLE_DEVICES" not in named:
        found["CUDA_VISIBLE_DEVICES"] = environ[REWARD_DEVICES]
    return found


def confine(limits: RewardConfinement) -> None:
    """Apply the limits to this process permanently. Must be called before it starts a thread.

    Raises:
        RewardLoadError: the kernel does not allow it.
    """
    _limit(resource.RLIMIT_CORE, 0)  # a core file could contain secrets from memory
    _limit(resource.RLIMIT_FSIZE, limits.max_file_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.max_open_files)
    _limit(resource.RLIMIT_AS, limits.max_memory_bytes)
    if limits.network and limits.max_processes is None:
        return
    try:
        if sys.platform != "linux":
            raise OSError("this system has no user namespaces")
        _enter_namespaces(network=limits.network, counted=limits.max_processes is not None)
    except OSError as error:
        raise RewardLoadError(_refusal(limits, error)) from error
    # After entering the namespace: outside it the limit counts all processes of the user, and the worker's threads.
    _limit(resource.RLIMIT_NPROC, limits.max_processes)


def _limit(what: int, most: int | None) -> None:
    if most is None:
        return
    # Both the soft and the hard limit, so that the process cannot raise them; lower existing limits stay.
    soft, hard = (most if limit == resource.RLIM_INFINITY else min(most, limit) for limit in resource.getrlimit(what))
    resource.setrlimit(what, (soft, hard))


def _refusal(limits: RewardConfinement, error: OSError) -> str:
    # ENOSPC: the limit of namespaces is reached; an administrator may have set it to 0.
    full = error.errno == errno.ENOSPC
    reason = "the limit user.max_user_namespaces is reached" if full else error.strerror or str(error)
    wanted = "rewards.max_processes" if limits.network else f"{limits.network_setting} = false"
    undo = "unset it" if limits.network else "set it to true"
    return (
        f"expected a kernel that gives reward processes a user namespace, for {wanted}, got: "
        f"{reason}; allow user namespaces (in a container, by its seccomp profile), or {undo}"
    )


def _enter_namespaces(*, network: bool, counted: bool) -> None:
    """Move this process into a user namespace, without a network unless ``network``, and drop its capabilities there.

    Raises:
        OSError: the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    # The kernel does not count processes whose real user is root. So a counted process becomes the user nobody, but
    # keeps access to root's files.
    becomes_nobody = counted and uid == 0
    users = f"0 0 1\n{_NOBODY} {_NOBODY} 1" if becomes_nobody else f"{uid} {uid} 1"
    maps = {"setgroups": "deny", "uid_map": users, "gid_map": f"{gid} {gid} 1"}
    flags = _CLONE_NEWUSER | (0 if network else _CLONE_NEWNET)
    if becomes_nobody:
        # A process can map only its own user into its namespace; a process outside can map others.
        _unshare_mapped_from_outside(flags, maps)
    else:
        _unshare(flags)
        _write_maps("self", maps)
    if becomes_nobody:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # In a new namespace a process has every capability, also over the kernel's tables of that namespace.
    _keep_capabilities(_FILE_CAPABILITIES if becomes_nobody else ())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 1)  # the change of user cleared it, and without it /proc/self is not accessible


def _unshare_mapped_from_outside(flags: int, maps: Mapping[str, str]) -> None:
    """Move this process into a new namespace, whose maps a forked helper writes from outside."""
    ready, signal_ready = os.pipe()
    own_pid = os.getpid()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(signal_ready)
            os.read(ready, 1)
            _write_maps(str(own_pid), maps)
            os._exit(0)
        except BaseException as error:
            os._exit(getattr(error, "errno", None) or 1)
    try:
        _unshare(flags)
    finally:
        # Closing the pipe lets the helper continue. It is closed in any case, so that the helper never waits for ever.
        os.close(signal_ready)
        os.close(ready)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


def _write_maps(process: str, maps: Mapping[str, str]) -> None:
    for name, text in maps.items():
        Path(f"/proc/{process}/{name}").write_text(text)


def _unshare(flags: int) -> None:
    _checked(_libc().unshare(flags))


def _prctl(option: int, *arguments: int) -> None:
    # The kernel reads unsigned longs; unused ones must be 0.
    padded = (ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4])
    _checked(_libc().prctl(option, *padded))


def _keep_capabilities(kept: Iterable[int]) -> None:
    """Drop all capabilities except ``kept``, which programs started by this process have too."""
    low = sum(1 << number for number in kept)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable sets: capabilities below 32, then those above.
    _checked(_libc().capset(header, (ctypes.c_uint32 * 6)(low, low, low, 0, 0, 0)))
    for number in kept:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
