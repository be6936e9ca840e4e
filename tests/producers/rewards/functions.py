"""Reward functions of every kind, good and bad; the completion's text says what to do."""

import asyncio
import ctypes
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

calls = 0
under_way = 0
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The limit in force while this module is imported."""


def obedient(completions: list[str], **_columns: Any) -> Any:
    """Does what the completion says; anything else scores its length."""
    text = completions[0]
    match text.split()[0] if text else "":
        case "hang":
            time.sleep(60)
        case "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "raise":
            raise ValueError("a\nreason over\ntwo lines")
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "segfault":
            ctypes.string_at(0)
        case "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        case "rest":
            time.sleep(0.05)
        case "print":
            print("x" * 100_000)
            os.write(1, b"\x93garbage")
        case "input":
            return [float(len(sys.stdin.read()))]
    results = {
        "nan": [math.nan],
        "inf": [math.inf],
        "huge": [10**400],
        "none": [None],
        "two": [1.0, 2.0],
        "empty": [],
        "text": ["1.0"],
        "bare": 1.0,
        "nothing": None,
        "true": [True],
    }
    return results.get(text, [float(len(text))])


def calls_at_once(completions: list[str]) -> list[float]:
    """How many of its own calls are under way with it."""
    global under_way
    under_way += 1
    time.sleep(0.05)
    found, under_way = under_way, under_way - 1
    return [float(found)]


def open_files(completions: list[str]) -> list[float]:
    """The limit that was in force before any of this module was executed."""
    return [float(OPEN_FILES)]


def hostile(completions: list[str]) -> list[float]:
    """Tries what the completion says; anything else scores its length."""
    match completions[0].split():
        case ["environment", file]:
            Path(file).write_text(json.dumps(dict(os.environ)))
            print("\n".join(f"{name}={value}" for name, value in os.environ.items()))
        case ["of_the_worker"]:
            return [float(len(Path(f"/proc/{os.getppid()}/environ").read_bytes()))]
        case ["connect", port]:
            socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
        case ["fork", number]:
            fork(int(number))
        case ["allocate", size]:
            bytearray(int(size))
        case ["write", file, size]:
            with open(file, "wb") as target:
                target.truncate(int(size))
        case ["open", number]:
            with ExitStack() as held:
                for _ in range(int(number)):
                    held.enter_context(open(os.devnull))
    return [float(len(completions[0]))]


def fork(number: int) -> None:
    """So many processes at the same time, each of which would live for a minute."""
    children: list[int] = []
    try:
        for _ in range(number):
            if (child := os.fork()) == 0:
                time.sleep(60)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def length(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def count_calls(**_arguments: Any) -> list[float]:
    global calls
    calls += 1
    return [float(calls)]


def report_arguments(**arguments: Any) -> list[float]:
    """Scores 1 if exactly what TRL documents was passed; the text carries the expected prompt as a literal."""
    arguments["log_metric"]("name", 1.0)
    arguments["log_extra"]("column", ["value"])
    expected = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "answer"}
    assert set(arguments) == expected, set(arguments)
    assert arguments["trainer_state"] is None
    assert arguments["answer"] == ["42"]
    assert arguments["completion_ids"] == [[5, 6, 7]]
    if isinstance(arguments["prompts"][0], list):
        assert arguments["prompts"] == [[{"role": "user", "content": "question"}]]
        return [float(arguments["completions"] == [[{"role": "assistant", "content": "text"}]])]
    return [float(arguments["prompts"] == ["question"] and arguments["completions"] == ["text"])]


def starts_a_program(completions: list[str]) -> list[float]:
    """Leaves its program's pid in the file that the completion names, and waits for it."""
    program = subprocess.Popen(["sleep", "60"])
    Path(completions[0]).write_text(str(program.pid))
    program.wait()
    return [0.0]


async def waits(completions: list[str]) -> list[float | None]:
    """Waits as many seconds as the completion says, politely or not."""
    kind, _, seconds = completions[0].partition(" ")
    if kind == "block":
        time.sleep(float(seconds))
    if kind == "exit":
        os._exit(5)
    if kind == "raise":
        raise RuntimeError("no")
    await asyncio.sleep(float(seconds or 0))
    return [1.0]


def positional(completions: Any, /) -> list[float]:
    return [0.0]


not_callable = 3
