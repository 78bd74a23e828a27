"""What is there: health, version, models, and the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ramet.api.server.errors import ApiError, invalid
from ramet.api.server.json_body import StrictRoute
from ramet.api.server.messages import normalised
from ramet.api.server.schemas import DetokenizeRequest, TokenizeRequest
from ramet.api.server.state import State, state_of
from ramet.engine.tokenizer import validate_token_ids

router = APIRouter(route_class=StrictRoute)


@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> Response:
    healthy = state_of(request).healthy
    return JSONResponse({"status": "ok" if healthy else "stopping"}, 200 if healthy else 503)


@router.get("/version")
async def get_version(request: Request) -> dict[str, str]:
    return {"version": request.app.version}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    state = state_of(request)
    return {"object": "list", "data": [_model(state, name) for name in state.settings.model_names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    state = state_of(request)
    return _model(state, state.check_model(name))


def _model(state: State, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "ramet",
        "root": state.settings.model_names[0],
        "parent": None,
        "max_model_len": state.engine.config.max_tokens,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The token ids of a text, or of messages through the chat template."""
    state = state_of(request)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "or messages must be given, and not both")
    if body.messages is not None:
        token_ids = await state.text.chat(
            normalised(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            options=body.chat_template_kwargs,
        )
    else:
        assert body.prompt is not None, "one of the two is given"
        special = body.add_special_tokens is not False
        token_ids = await state.text.encode(body.prompt, "prompt", add_special_tokens=special)
    names = [state.text.token_text(one) for one in token_ids] if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": state.engine.config.max_tokens,
        "tokens": token_ids,
        "token_strs": names,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """The text of token ids, control tokens included."""
    state = state_of(request)
    state.check_model(body.model)
    token_ids = validate_token_ids(body.tokens, state.text.vocab_size, "tokens")
    return {"prompt": state.text.tokenizer.decode_unchecked(token_ids, skip_special_tokens=False)}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What lm-eval and others ask before they tokenize elsewhere."""
    state = state_of(request)
    hf = state.text.tokenizer.hf
    if hf.eos_token is None:
        raise ApiError(404, "this tokenizer has no end token", code="no_eos_token")
    return {
        "tokenizer_class": type(hf).__name__,
        "vocab_size": len(hf),
        "model_max_length": state.engine.config.max_tokens,
        "bos_token": hf.bos_token,
        "eos_token": hf.eos_token,
        "pad_token": hf.pad_token,
        "unk_token": hf.unk_token,
        "chat_template": hf.chat_template,
    }
