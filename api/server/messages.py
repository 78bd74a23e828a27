"""Messages as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramet.api.server.errors import ApiError, invalid, unsupported
from ramet.api.server.json_body import parse
from ramet.api.server.schemas import Message, ToolCall


def normalised(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Content as one text, tool arguments as objects, "developer" as "system".

    Raises ApiError, which names the place.
    """
    return [_normalised(message, f"messages.{index}") for index, message in enumerate(messages)]


def _normalised(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message, f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls.{index}") for index, call in calls]
    return plain


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise invalid(where, "must be a text or a list of text parts")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image_url", "input_audio", "file", "video_url"):
                raise unsupported(f"{where}.{index}", f"is {kind}: this model reads text only")
            raise invalid(f"{where}.{index}", "must be a text part")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """Clients send arguments as JSON in a text, and templates read an object."""
    try:
        arguments = parse((call.function.arguments or "{}").encode())
    except ApiError:
        raise invalid(f"{where}.function.arguments", "must be a JSON object in a text") from None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments", "must be a JSON object in a text")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
