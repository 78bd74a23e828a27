"""Every error that a client sees, in the shape of OpenAI's, and which ones are worth a retry.

The openai client retries 408, 409, 429 and 5xx by itself unless `x-should-retry` says otherwise, so each
error says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ramet.engine.async_llm import Closed
from ramet.engine.errors import BranchReleased, InvalidInput, OutOfCapacity, StepFailed

_TYPE_OF = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_RETRY_AFTER_S = 1


class ApiError(HTTPException):
    """An error as the client gets it. `param` names what is wrong; `retry`: the same may work later."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        after = {"retry-after": str(_RETRY_AFTER_S)} if retry else {}
        flag = "true" if retry else "false"
        super().__init__(status, message, {"x-should-retry": flag, **after, **(headers or {})})
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": _TYPE_OF.get(self.status_code, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def invalid(param: str, limit: str, *, code: str = "invalid_value") -> ApiError:
    """A value that breaks a rule; `limit` is a phrase that follows the name ("must be >= 1")."""
    return ApiError(400, f"{param} {limit}", code=code, param=param)


def unsupported(param: str, why: str = "is not supported") -> ApiError:
    return invalid(param, why, code="unsupported_parameter")


def not_found(what: str, name: str, param: str | None = None) -> ApiError:
    """`param`: the field of the body that names it, if it is not the path."""
    return ApiError(404, f"there is no {what} {name[:80]!r}", code=f"{what}_not_found", param=param)


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """If a request can never fit, it is because of this field: the engine knows none."""
    try:
        yield
    except OutOfCapacity as error:
        raise _out_of_capacity(error, field) from error


def _out_of_capacity(error: OutOfCapacity, field: str | None) -> ApiError:
    if error.unit == "blocks" and error.needed <= error.available:
        message = "the blocks that this needs are held by pinned branches"
        return ApiError(429, message, code="kv_capacity_exhausted", retry=True)
    return ApiError(400, str(error), code="context_length_exceeded", param=field)


def of_engine(error: BaseException) -> ApiError | None:
    """What a client is told of an error of the engine; None if it is a bug."""
    match error:
        case ApiError():
            return error
        case InvalidInput():
            return ApiError(400, str(error), code="invalid_value", param=error.field)
        case OutOfCapacity():
            return _out_of_capacity(error, None)
        case BranchReleased():
            return ApiError(404, "the branch was released meanwhile", code="branch_not_found")
        case StepFailed():
            return ApiError(500, "the model failed in a step of this request", code="step_failed", retry=True)
        case Closed():
            return ApiError(503, "the engine is stopping", code="engine_restarting", retry=True)
    return None


INTERNAL = ApiError(500, "internal error; the log has it under this request id", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of anything that a handler raises; raises the error itself if it is a bug."""
    if isinstance(error, RequestValidationError):
        return of_validation(error.errors())
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        code = {404: "path_not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    found = of_engine(error)
    if found is None:
        raise error
    return found


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors, without its input: that may be long, secret, or no JSON."""
    error = errors[0]
    where = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    if error["type"] in ("json_invalid", "model_attributes_type") and not where:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    param = ".".join(where) or "body"
    if error["type"] == "extra_forbidden":
        return unsupported(param, "is not a parameter here")
    return invalid(param, f"is not valid: {error['msg']}")
