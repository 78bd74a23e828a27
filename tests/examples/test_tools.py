"""The tools of the examples: right where they can be, and stopped where they must be."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from examples.tools import calculator, python


@pytest.mark.parametrize(
    ("expression", "value"),
    [("4 * 6", "24"), (" 24 - 5 ", "19"), ("7 / 2", "7/2"), ("2 * (3 + 4)", "14"), ("10**9**9", "error")],
)
def test_the_calculator_is_exact_and_takes_nothing_else(expression: str, value: str) -> None:
    assert asyncio.run(calculator(expression)).startswith(value)


@pytest.mark.parametrize("text", ["", "1 / 0", "__import__('os')", "a + 1", "1 +", "'a' * 9", "(" * 500])
def test_what_is_no_sum_is_an_error_and_raises_nothing(text: str) -> None:
    assert asyncio.run(calculator(text)).startswith("error: ")


def test_python_says_what_was_printed_or_what_went_wrong() -> None:
    async def main() -> tuple[str, str, str, str]:
        return await asyncio.gather(
            python("print(213 * 47)"),
            python("1 / 0"),
            python("print('x' * 10**6)"),
            python("import os; os._exit(3)"),
        )

    printed, failed, much, ended = asyncio.run(main())
    assert printed == "10011"
    assert failed == "error: ZeroDivisionError: division by zero"
    assert len(much) == 10_000
    assert ended == "error: ended with 3"


def test_a_program_that_takes_too_much_is_stopped(tmp_path: Path) -> None:
    async def main() -> tuple[str, str, str, str]:
        return await asyncio.gather(
            python("while True: pass", seconds=0.5),
            python("import time; time.sleep(60)", seconds=0.5),
            python("print(len([0] * 10**10))"),
            python(f"open({str(tmp_path / 'file')!r}, 'w').write('x' * 9999)"),
        )

    start = time.perf_counter()
    endless, asleep, memory, disk = asyncio.run(main())
    assert endless == asleep == "error: stopped after 0.5 s"
    assert "MemoryError" in memory and disk.startswith("error: ")
    assert time.perf_counter() - start < 10


def test_the_system_may_stop_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy caller comes to its clock only after the processor time is spent."""
    start = asyncio.create_subprocess_exec

    async def start_slowly(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        process = await start(*args, **kwargs)
        await process.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    assert asyncio.run(python("while True: pass", seconds=0.5)) == "error: stopped after 0.5 s"


def test_a_cancelled_caller_takes_the_program_with_it() -> None:
    async def main() -> None:
        task = asyncio.create_task(python("import time; time.sleep(60)", seconds=60))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    start = time.perf_counter()
    asyncio.run(main())
    assert time.perf_counter() - start < 10
