"""The Python tool: what a program may not do, and what of it the policy is told."""

import io
import json
from pathlib import Path

import pytest

from streamrl.producers.environments import python_tool
from streamrl.producers.environments.python_tool import MAX_OUTPUT, PythonTool
from streamrl.schemas.environments import PolicyReply, ToolUse
from streamrl.schemas.errors import UserError

pytestmark = pytest.mark.processes

TASKS = [{"question": "What is 6 times 7?", "answer": 42}]


def calling(code: str) -> PolicyReply:
    use = ToolUse("c1", "python", json.dumps({"code": code}))
    return PolicyReply("", (use,), "tool_calls", {"role": "assistant", "content": ""})


async def told(tool: PythonTool, code: str) -> str:
    (message,) = (await tool.step(calling(code))).messages
    assert (message["role"], message["tool_call_id"]) == ("tool", "c1")
    return str(message["content"])


def test_code_is_confined_or_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_namespace(limits: object) -> None:
        raise UserError("the kernel gives no user namespace")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python_tool, "confine", no_namespace)
    monkeypatch.setattr("sys.stdin", io.StringIO("open('it_ran', 'w').close()"))
    with pytest.raises(SystemExit, match="nothing was run: the kernel gives no user namespace"):
        python_tool.main("{}")
    assert not (tmp_path / "it_ran").exists()


async def test_a_program_runs_without_network_and_within_its_limits() -> None:
    tool = PythonTool(tasks=TASKS, timeout_s=20.0)
    assert [one["content"] for one in await tool.reset(5)] == ["What is 6 times 7?"]
    assert await told(tool, "print(6 * 7)") == "42\n"
    code = (
        "import socket\n"
        "for where in (('127.0.0.1', 9), ('192.0.2.1', 80)):\n"
        "    try: socket.create_connection(where, 1)\n"
        "    except OSError as error: print(type(error).__name__)\n"
        "try: bytearray(1 << 30)\n"
        "except MemoryError: print('memory')\n"
        "import os; print(sorted(name for name in os.environ if 'STREAMRL' in name))\n"
        "1/0"
    )
    said = await told(tool, code)
    assert "memory" in said
    assert "[]" in said
    assert "ZeroDivisionError" in said
    assert "Traceback" in said
    assert said.count("Error") >= 3


async def test_a_program_is_ended_in_time_and_its_output_is_cut() -> None:
    assert await told(PythonTool(tasks=TASKS, timeout_s=1.0), "while True: pass") == "timed out after 1 s"
    patient = PythonTool(tasks=TASKS, timeout_s=60.0)  # the cut ends it at once, if a process gets to start
    assert len(await told(patient, "while True: print('x' * 1000)")) == MAX_OUTPUT


async def test_the_last_word_is_the_answer_and_a_block_of_code_is_run() -> None:
    tool = PythonTool(tasks=TASKS, timeout_s=20.0)
    await tool.reset(0)
    block = PolicyReply("so:\n```python\nprint(1)\n```", (), "stop", {})
    assert [one["content"] for one in (await tool.step(block)).messages] == ["1\n"]
    assert (await tool.step(PolicyReply("It is 42.", (), "stop", {}))).reward == 1.0
    assert (await tool.step(PolicyReply("It is 41", (), "stop", {}))).reward == 0.0
    wrong = PolicyReply("", (ToolUse("c", "java", "{"),), "tool_calls", {})
    assert "expected the tool python" in (await tool.step(wrong)).messages[0]["content"]
    with pytest.raises(UserError, match="tasks"):
        PythonTool()
