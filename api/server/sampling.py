"""From a request's fields to SamplingParams, and no field left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ramet.api.server.branch_schemas import BeamFields
from ramet.api.server.errors import invalid, unsupported
from ramet.api.server.schemas import Body, GenerationRequest, SamplingFields
from ramet.engine.beam_params import MAX_BEAMS, SHARED_FIELDS, BeamSearchParams
from ramet.engine.checks import check_int
from ramet.engine.sampling_params import SamplingParams

_NOT_OF_BEAMS = ("prompt_logprobs", "logprob_token_ids", "return_entropy")
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
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise invalid("length_penalty", "needs use_beam_search to be true")
        if body.early_stopping not in (None, False):
            raise invalid("early_stopping", "needs use_beam_search to be true")


def sampling_params(body: SamplingFields, **changes: Any) -> SamplingParams:
    """The fields that were given, with `changes` in place of some. Raises InvalidInput or ApiError."""
    return SamplingParams(**_given(body, SamplingFields.model_fields, changes))


def beam_params(body: GenerationRequest, **changes: Any) -> BeamSearchParams:
    """The same for a request with use_beam_search. What only matters where tokens are drawn at random does
    nothing. Raises ApiError or InvalidInput."""
    for name in _NOT_OF_BEAMS:
        if getattr(body, name) not in (None, False, []):
            raise unsupported(name, "says nothing of beams")
    names = (*SHARED_FIELDS, "length_penalty", "early_stopping")
    n = 1 if body.n is None else body.n
    check_int("n", n, 1, MAX_BEAMS)
    return BeamSearchParams(**_given(body, names, {"num_beams": n, **changes}))


def beam_search_params(body: BeamFields, **changes: Any) -> BeamSearchParams:
    """The fields of a request for a beam search. Raises ApiError or InvalidInput."""
    return BeamSearchParams(**_given(body, BeamFields.model_fields, changes))


def _given(body: Body, names: Iterable[str], changes: dict[str, Any]) -> dict[str, Any]:
    given = {name: getattr(body, name, None) for name in names}
    if given["logit_bias"] is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in given["logit_bias"].items()}
    given.update(changes)
    keep_null = {"max_tokens"}  # it means: as long as there is room
    return {name: value for name, value in given.items() if value is not None or name in keep_null}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
        raise invalid("logit_bias", "must have token ids as keys")
    return int(key)
