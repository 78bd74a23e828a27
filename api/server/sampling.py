"""From a request's fields to SamplingParams, and no field left out."""

from __future__ import annotations

from typing import Any

from ramet.api.server.errors import invalid, unsupported
from ramet.api.server.schemas import GenerationRequest, SamplingFields
from ramet.engine.sampling_params import SamplingParams

_MAX_ID_DIGITS = 12


def refuse_unsupported(body: GenerationRequest) -> None:
    """Raise ApiError for the first field that asks for what is not there."""
    for name, harmless in body.UNSUPPORTED.items():
        value = getattr(body, name)
        # By type as well: 0 is no false here.
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise unsupported(name)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")


def sampling_params(body: SamplingFields, **changes: Any) -> SamplingParams:
    """The fields that were given, with `changes` in place of some. Raises InvalidInput or ApiError."""
    given = {name: getattr(body, name) for name in SamplingFields.model_fields}
    if given["logit_bias"] is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in given["logit_bias"].items()}
    given.update(changes)
    keep_null = {"max_tokens"}  # it means: as long as there is room
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None or name in keep_null}
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
        raise invalid("logit_bias", "must have token ids as keys")
    return int(key)
