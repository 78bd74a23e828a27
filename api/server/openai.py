"""The endpoints that OpenAI's clients call."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ramet.api.server import chat_branches
from ramet.api.server.answers import respond
from ramet.api.server.branch_verbs import context_of
from ramet.api.server.chat_completions import ChatAnswer, chat_params
from ramet.api.server.completions import CompletionAnswer, completion_params
from ramet.api.server.errors import blaming, not_found
from ramet.api.server.json_body import StrictRoute
from ramet.api.server.schemas import ChatRequest, CompletionRequest, GenerationRequest
from ramet.api.server.state import State, request_id_of, state_of, tenant_of
from ramet.engine.beam_params import BeamSearchParams
from ramet.engine.sampling_params import SamplingParams

router = APIRouter(route_class=StrictRoute)
_MAX_UNREAD = 256  # tokens of a choice that wait for a slow client before the choice does


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or many, each a text or token ids."""
    state, tenant = state_of(request), tenant_of(request)
    model = state.check_model(body.model)
    with blaming("prompt"), ExitStack() as held:
        works = held.enter_context(tenant.running(request_id_of(request)))
        prompts = await state.text.prompts(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
        params = completion_params(body, len(prompts))
        answer = CompletionAnswer(state, body, model, prompts, _count(state, params, len(prompts)))
        work = held.enter_context(
            state.engine.start(
                prompts,
                params,
                namespace=tenant.namespace(body.cache_salt),
                max_unread=_max_unread(body, params),
            )
        )
        works.append(work)
        if body.stream:
            await work.started()  # an error is no stream yet
        return await respond(request, answer, work, held)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation; with store_branch its choices stay, as branches."""
    context = context_of(request)
    state, tenant = context.state, context.tenant
    model = state.check_model(body.model)
    if body.store_branch:
        with blaming("messages"):
            return await chat_branches.keep(context, body, model, request)
    with blaming("messages"), ExitStack() as held:
        works = held.enter_context(tenant.running(request_id_of(request)))
        params = chat_params(body)
        prompt, namespace = await chat_branches.prompt_of(context, body)
        answer = ChatAnswer(state, body, model, [prompt], _count(state, params, 1))
        work = held.enter_context(
            state.engine.start(
                [prompt],
                params,
                namespace=namespace,
                max_unread=_max_unread(body, params),
            )
        )
        works.append(work)
        if body.stream:
            await work.started()  # an error is no stream yet
        return await respond(request, answer, work, held)


def _count(state: State, params: SamplingParams | BeamSearchParams, num_prompts: int) -> int:
    """How many choices each prompt gets."""
    if isinstance(params, SamplingParams):
        return params.n
    state.metrics.beams(params, num_prompts)
    return params.num_returned


def _max_unread(body: GenerationRequest, params: SamplingParams | BeamSearchParams) -> int | None:
    """A beam search has no tokens to tell before its end: a stream of it sends each choice as a whole."""
    return _MAX_UNREAD if body.stream and isinstance(params, SamplingParams) else None


@router.post("/v1/chat/completions/render")
async def render(body: ChatRequest, request: Request) -> dict[str, Any]:
    """What the model would read; nothing runs."""
    state = state_of(request)
    state.check_model(body.model)
    chat_params(body)
    prompt, _ = await chat_branches.prompt_of(context_of(request), body)
    return {"prompt": state.text.decode(prompt), "prompt_token_ids": prompt}


@router.post("/v1/admin/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, Any]:
    """Forget what was computed of this tenant's prompts; its idle branches compute their tokens again."""
    engine = state_of(request).engine
    freed = await engine.reset_prefix_cache(tenant_of(request).owns)
    return {"object": "prefix_cache.reset", "freed_blocks": freed, "freed_bytes": freed * engine.block_nbytes}


@router.post("/v1/requests/{request_id}/cancel")
async def cancel(request_id: str, request: Request) -> dict[str, Any]:
    """End what runs under the x-request-id that this client sent or was given; tokens so far are kept."""
    count = await tenant_of(request).cancel(request_id)
    state_of(request).metrics.cancelled(count)
    if not count:
        raise not_found("request", request_id)
    return {"id": request_id, "object": "request", "cancelled": count}
