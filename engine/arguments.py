"""What callers hand to the verbs, checked and brought into one form. Errors name the argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.checks import check_int, checked_list, plain
from ramet.engine.errors import InvalidInput
from ramet.engine.sampling_params import SamplingParams

Prompt: TypeAlias = str | Seq[int]
P = TypeVar("P", SamplingParams, BeamSearchParams)


def params_of(params: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    check_either(params, settings)
    return _made(SamplingParams, settings) if params is None else checked_params(params)


def beam_params_of(params: BeamSearchParams | None, settings: dict[str, Any]) -> BeamSearchParams:
    check_either(params, settings)
    if params is None:
        return _made(BeamSearchParams, settings)
    if not isinstance(params, BeamSearchParams):
        raise InvalidInput("params", "must be BeamSearchParams", params)
    return params


def _made(kind: type[P], settings: dict[str, Any]) -> P:
    known = [field.name for field in fields(kind) if field.init]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise InvalidInput(", ".join(unknown), f"is no setting; there are {', '.join(known)}")
    return kind(**settings)


def checked_params(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidInput("params", "must be SamplingParams", params)
    return params


def check_either(params: object, settings: dict[str, Any]) -> None:
    if params is not None and settings:
        raise InvalidInput("params", f"cannot be given together with {', '.join(sorted(settings))}")


def params_of_each(
    params: SamplingParams | Seq[SamplingParams] | None, settings: dict[str, Any], count: int
) -> list[SamplingParams]:
    """The settings of each of `count` prompts or branches."""
    if params is None or isinstance(params, SamplingParams):
        return [params_of(params, settings)] * count
    many = checked_list("params", params, "SamplingParams")
    if settings or len(many) != count:
        raise InvalidInput("params", f"must be one for all or {count}, and without settings beside them")
    return [checked_params(one) for one in many]


def check_int32(field: str, value: object) -> None:
    check_int(field, value, -(2**31), 2**31 - 1)


def fields_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def prompts_of(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list: a list of numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    many = [plain(one) for one in checked_list("prompt", prompts, "token ids, a text, or a list of these")]
    if many and not all(isinstance(one, Iterable) for one in many):
        return [many]
    return many


def check_count(field: str, n: object) -> None:
    check_int(field, n, 1, 1 << 16)
