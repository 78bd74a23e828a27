"""The errors that a user can cause or has to know about, each with the numbers that explain it.

Bugs of ramet itself are asserts, never one of these.
"""

from __future__ import annotations


class RametError(Exception):
    """The base of every error that ramet raises on purpose."""


class InvalidInput(RametError, ValueError):
    """A value that a caller handed in breaks a limit.

    Attributes:
        field: the name of the parameter, as the caller wrote it.
        limit: the rule it breaks, as a phrase that follows the field ("must be >= 1").
    """

    def __init__(self, field: str, limit: str, value: object = ...) -> None:
        # The ellipsis stands for "no value to show": None is a value that a caller may have sent.
        got = "" if value is ... else f", got {_shown(value)}"
        super().__init__(f"{field} {limit}{got}")
        self.field = field
        self.limit = limit


class OutOfCapacity(RametError):
    """A request that can never fit, however long it waits.

    Attributes:
        needed: how many units the request takes.
        available: how many units there are in all.
        unit: what is counted, "blocks" of the pool or "tokens" of the context.
    """

    def __init__(self, needed: int, available: int, unit: str = "blocks") -> None:
        super().__init__(f"the request needs {needed} {unit}, and there are {available} in all")
        self.needed = needed
        self.available = available
        self.unit = unit


class BranchReleased(RametError):
    """A verb was called on a branch that has been released or pruned.

    Attributes:
        branch_id: the branch's own number or name.
    """

    def __init__(self, branch_id: object) -> None:
        super().__init__(f"branch {branch_id} has been released")
        self.branch_id = branch_id


class UnsupportedModel(RametError):
    """A model that would run wrongly, or not at all.

    Attributes:
        name: the model's name, path or class.
        reason: what about it is not supported, as a phrase.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"model {name!r} is not supported: {reason}")
        self.name = name
        self.reason = reason


class ModelNotFound(RametError):
    """No weights under this name; the message says in one line how to get them.

    Attributes:
        name: the name that was asked for.
        remedy: what to do about it.
    """

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"model {name!r} was not found: {remedy}")
        self.name = name
        self.remedy = remedy


class StepFailed(RametError):
    """A forward pass failed, so the requests of that step were not completed.

    The exception that caused it is ``__cause__``.
    """


class BadLogits(StepFailed):
    """The model gave logits from which no token can be chosen (NaN or infinite).

    Attributes:
        rows: which rows of the logits; the others of the step are sound.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"the logits of rows {list(rows)} are not finite numbers")
        self.rows = rows


def _shown(value: object) -> str:
    """The value as an error message shows it: always short, whatever a caller sent."""
    try:
        text = repr(value)
    except Exception:  # A caller's own __repr__ must not turn a clear error into another one.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
