"""What a reward process is given and may take: its environment, its limits, and whether it has a network.

A reward judges, and may run, what a model wrote. Invariants:
- a_reward_is_handed_no_secret: of the worker's environment it gets what programs need to run, and what the user names;
- the_limits_stand_before_the_users_code: they are set in the process itself, before anything of the user is imported,
  and cannot be raised again (but by root, which a worker should not be).

Taking the network and counting processes needs a user namespace of Linux. In one, a process has its network (an empty
one, in which even loopback is down) and its count of processes for itself; of another namespace's processes it can read
neither memory nor environment, also where they belong to the same user.
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
        # where programs, libraries, the user's files and the time of day are
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        # how many threads libraries start, and which devices they see
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"),
        *("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "HIP_VISIBLE_DEVICES"),
        # where models that judge are kept
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE"),
        *("XDG_CACHE_HOME", "TORCH_HOME", "NLTK_DATA"),
    }
)
"""Variables that every reward process gets: none of them is known to hold a credential."""
PASSED_ON_PREFIXES = ("LC_", "PYTHON")
REWARD_DEVICES = "STREAMRL_REWARD_DEVICES"
"""Of a worker's environment: the CUDA devices of its reward processes, which are not its own. No setting of the run,
since it differs from worker to worker."""

# Of the kernel's headers: sched.h, prctl.h and capability.h.
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 4, 8, 38, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_FILE_CAPABILITIES = (0, 1, 2, 3)  # CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER
_NOBODY = 65534


@dataclass(frozen=True)
class RewardConfinement:
    """Limits of one reward process and of all that it starts; none: no limit of ours.

    ``network_setting``: what took the network.
    """

    network: bool = True
    max_processes: int | None = None
    max_memory_bytes: int | None = None
    max_file_bytes: int | None = None
    max_open_files: int | None = None
    network_setting: str = "rewards.network"


def environment_for(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The environment of a reward process: what programs need of ``environ``, and the variables that the user names.

    Where the worker was told which devices are for rewards, it sees those, unless the user names the worker's own.
    """
    named = frozenset(names)
    wanted = PASSED_ON | named
    found = {name: value for name, value in environ.items() if name in wanted or name.startswith(PASSED_ON_PREFIXES)}
    if REWARD_DEVICES in environ and "CUDA_VISIBLE_DEVICES" not in named:
        found["CUDA_VISIBLE_DEVICES"] = environ[REWARD_DEVICES]
    return found


def confine(limits: RewardConfinement) -> None:
    """Take from this process, for good, what it shall not have. Before it starts a thread.

    Raises:
        RewardLoadError: the kernel does not let us.
    """
    _limit(resource.RLIMIT_CORE, 0)  # memory may hold what no file should
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
    # Only now: outside a namespace of its own it would count all processes of the user, the worker's threads included.
    _limit(resource.RLIMIT_NPROC, limits.max_processes)


def _limit(what: int, most: int | None) -> None:
    if most is None:
        return
    # Both, so that the process cannot raise the one up to the other; a lower one that is there already stays.
    soft, hard = (most if limit == resource.RLIM_INFINITY else min(most, limit) for limit in resource.getrlimit(what))
    resource.setrlimit(what, (soft, hard))


def _refusal(limits: RewardConfinement, error: OSError) -> str:
    # ENOSPC is the kernel's word for a number of namespaces that is reached, or that an administrator set to 0.
    said = "no more of them (user.max_user_namespaces)" if error.errno == errno.ENOSPC else error.strerror or str(error)
    wanted = "rewards.max_processes" if limits.network else f"{limits.network_setting} = false"
    undo = "leave it out" if limits.network else "set it to true"
    return (
        f"expected a kernel that gives reward processes a user namespace, for {wanted}, got: "
        f"{said}; allow user namespaces (in a container, by its seccomp profile), or {undo}"
    )


def _enter_namespaces(*, network: bool, counted: bool) -> None:
    """Move this process into a user namespace, without a network if it shall have none, and drop its powers there.

    Raises:
        OSError: the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    # The kernel counts no process whose real user is root, so a counted one becomes nobody, but keeps root's files.
    becomes_nobody = counted and uid == 0
    users = f"0 0 1\n{_NOBODY} {_NOBODY} 1" if becomes_nobody else f"{uid} {uid} 1"
    maps = {"setgroups": "deny", "uid_map": users, "gid_map": f"{gid} {gid} 1"}
    flags = _CLONE_NEWUSER | (0 if network else _CLONE_NEWNET)
    if becomes_nobody:
        # A process maps no user but its own into its namespace; one that stayed outside may.
        _mapped_from_outside(flags, maps)
    else:
        _unshare(flags)
        _write_maps("self", maps)
    if becomes_nobody:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # In its namespace a process begins with every capability, also over the kernel's tables of that namespace.
    _keep_capabilities(_FILE_CAPABILITIES if becomes_nobody else ())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 1)  # a change of user ends it, and with it /proc/self


def _mapped_from_outside(flags: int, maps: Mapping[str, str]) -> None:
    ready, say = os.pipe()
    me = os.getpid()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(say)
            os.read(ready, 1)
            _write_maps(str(me), maps)
            os._exit(0)
        except BaseException as error:
            os._exit(getattr(error, "errno", None) or 1)
    try:
        _unshare(flags)
    finally:
        # Closed in any case, which the helper takes for the word: it must not wait for ever.
        os.close(say)
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
    # Unsigned longs, as the kernel reads them; those that are unused have to be 0.
    padded = (ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4])
    _checked(_libc().prctl(option, *padded))


def _keep_capabilities(kept: Iterable[int]) -> None:
    """Drop all capabilities but those, which programs that are started have as well."""
    low = sum(1 << number for number in kept)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable: of the numbers below 32, then of those above.
    _checked(_libc().capset(header, (ctypes.c_uint32 * 6)(low, low, low, 0, 0, 0)))
    for number in kept:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
