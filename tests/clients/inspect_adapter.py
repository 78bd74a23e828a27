# needs: ramet inspect-ai==0.3.285
"""inspect-ai over the engine in process: several choices, log-probabilities, usage, and what is refused."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, fork, generate, solver
from inspect_ai.tool import ToolInfo
from inspect_ai.util import JSONSchema


@solver  # type: ignore[untyped-decorator, unused-ignore]
def ask_twice() -> Solver:
    """A second turn, whose prompt begins with all of the first."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Say it again, please."))
        return await generate(state)

    return solve


@solver  # type: ignore[untyped-decorator, unused-ignore]
def ask_three_ways() -> Solver:
    """Three branches of one conversation, which inspect-ai forks by copying its messages."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Can you put that in another way, please?"))
        ways = await fork(state, [ask_once() for _ in range(3)])
        state.metadata["computed"] = [way.output.usage.input_tokens for way in ways]
        return state

    return solve


@solver  # type: ignore[untyped-decorator, unused-ignore]
def ask_once() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state)

    return solve


def run(model: Model, solvers: Solver, **settings: Any) -> Any:
    samples = [
        Sample(input="What is the capital of France?", target="Paris"),
        Sample(input="Say hello.", target="h"),
    ]
    task = Task(dataset=samples, solver=solvers, scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(task, model=model, log_dir=folder, display="none", **settings)
        assert log.status == "success", log.error
        assert log.samples is not None and len(log.samples) == 2
        return log.samples


async def refused(model: Model, field: str, **arguments: Any) -> None:
    try:
        await model.generate(**{"input": "Say hello.", **arguments})
    except Exception as error:
        said = str(error)
    else:
        said = "nothing was refused"
    assert field in said, said


# An entry point of ramet's installation tells inspect-ai whose models these are.
model = get_model("ramet/smollm2", dtype="float32", num_blocks=512)
settings = {"max_tokens": 16, "seed": 1, "temperature": 0.5}
for sample in run(model, generate(), num_choices=2, logprobs=True, top_logprobs=2, **settings):
    assert len(sample.output.choices) == 2
    usage = sample.output.usage
    rows = [choice.logprobs.content for choice in sample.output.choices]
    assert usage.output_tokens == sum(map(len, rows)), usage
    assert usage.total_tokens == usage.input_tokens + usage.input_tokens_cache_read + usage.output_tokens
    for choice, content in zip(sample.output.choices, rows, strict=True):
        assert all(len(row.top_logprobs) == 2 for row in content)
        assert all(row.top_logprobs[0].logprob >= row.top_logprobs[1].logprob for row in content)
        said = b"".join(bytes(row.bytes) for row in content).decode()
        assert said.removesuffix("<|im_end|>") == choice.message.content, (said, choice.message.content)
        assert choice.stop_reason == ("stop" if said.endswith("<|im_end|>") else "max_tokens"), choice
for sample in run(model, ask_twice(), **settings):
    message = {"role": "user", "content": sample.messages[0].text}
    first = len(model.api.llm.tokenizer.apply_chat_template([message]))
    # At least the whole blocks of the first turn's prompt are found again.
    assert sample.output.usage.input_tokens_cache_read >= first // 16 * 16 > 0, sample.output.usage


for sample in run(model, ask_three_ways(), **settings):
    # One of the three computes what is new; the others at most what fills no block.
    assert sorted(sample.metadata["computed"])[1] < 16, sample.metadata


async def refusals() -> None:
    assert await model.api.count_tokens("Say hello.") > 2
    await refused(model, "temperature", config=GenerateConfig(temperature=-1))
    await refused(model, "best_of", config=GenerateConfig(best_of=2))
    schema = ResponseSchema(name="colour", json_schema=JSONSchema(type="object"))
    await refused(model, "response_schema", config=GenerateConfig(response_schema=schema))
    await refused(model, "tools", tools=[ToolInfo(name="add", description="Adds.")])
    image = ContentImage(image="data:image/png;base64,AAAA")
    await refused(model, "text only", input=[ChatMessageUser(content=[image])])
    await model.api.aclose()


asyncio.run(refusals())
