"""Tools that a search may call: a calculator, and Python in a process of its own that cannot run away."""

from __future__ import annotations

import ast
import asyncio
import operator
import resource
import signal
import sys
from collections.abc import Callable
from fractions import Fraction

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MOST_OUTPUT = 10_000  # bytes


async def calculator(expression: str) -> str:
    """The value of a text with numbers and + - * /, exact; of anything else an error."""
    try:
        return str(_evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("only numbers and + - * / are allowed")


async def python(code: str, *, seconds: float = 5.0, megabytes: int = 256) -> str:
    """What a program prints, or the last line of its error; it is stopped at these limits.

    It has an empty environment and no input, which keeps an honest program in its place: it is no prison.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        cpu = int(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
        preexec_fn=limit,
        start_new_session=True,
    )
    stopped = f"error: stopped after {seconds:g} s"
    try:
        out, err = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        return stopped
    finally:
        if process.returncode is None:  # also where the search was cancelled while the program ran
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGXCPU:  # the system was quicker than a busy event loop
        return stopped
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        return f"error: {lines[-1][:200] if lines else f'ended with {process.returncode}'}"
    return out[:_MOST_OUTPUT].decode(errors="replace").strip()
