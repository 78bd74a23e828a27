"""The command line: reads options, loads a model, hands over. Errors are one line; nothing heavy is imported
before a command needs it, so that `ramet --help` answers at once."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ramet.api.options import BlockSize, Device, Dtype, DtypeOption, NumBlocks
from ramet.api.plan import plan
from ramet.api.serve import serve

if TYPE_CHECKING:
    from rich.console import Console

    from ramet.api.bench import Report
    from ramet.engine.llm import LLM


class Bench(StrEnum):
    radix = "radix"
    attention = "attention"
    memory = "memory"
    cpu = "cpu"
    throughput = "throughput"
    serve = "serve"
    search = "search"
    beams = "beams"


Model = Annotated[
    str, typer.Option(help="smollm2 (the embedded default), a hub id, a folder, or a .gguf file.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
MaxTokens = Annotated[int, typer.Option(help="How many tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token always.")]
TopP = Annotated[float, typer.Option(help="Draw from the fewest tokens that hold this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 means all.")]

app = typer.Typer(
    name="ramet",
    help="The inference backend for agents that think in trees: fork a branch, share its pages.",
    epilog="Start with `ramet demo`. Each command explains itself: `ramet demo --help`.",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point: every error that a user can cause ends as one line on stderr, never as a trace."""
    # On shared cores, threads that wait by spinning take the time of those they wait for: steps get several
    # times slower. OpenMP reads this when torch is imported, so it must come first.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        status = app(prog_name="ramet", standalone_mode=False)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # whoever read our output has enough
        sys.stdout = None  # else Python complains when it closes it
        status = 0
    except Exception as error:
        status = _report(error)
    sys.exit(status if isinstance(status, int) else 0)


def _report(error: Exception) -> int:
    """Print an expected error as one line and return the exit status; raise one that is a bug."""
    from ramet.engine.errors import InvalidInput, RametError

    if isinstance(error, RametError):
        message, status = str(error), 2 if isinstance(error, InvalidInput) else 1
    elif hasattr(error, "format_message") and hasattr(error, "exit_code"):  # of the option parser
        message, status = error.format_message(), error.exit_code
    elif isinstance(error, typer.Abort):
        return 130
    else:
        raise error
    print(f"ramet: {' '.join(message.split())}", file=sys.stderr)
    return int(status)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ramet {version('ramet')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """The options before the command; without a command, the help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _consoles() -> tuple[Console, Console]:
    """Standard output and standard error."""
    from rich.console import Console

    return Console(), Console(stderr=True)


def _load(
    err: Console, model: str, device: str, dtype: Dtype, num_blocks: int | None, block_size: int
) -> LLM:
    """The model, with a word about what takes so long."""
    first = "; the first start converts it, a minute, later ones take seconds" if model == "smollm2" else ""
    with err.status(f"loading {model}{first}"):
        from ramet.engine.llm import LLM

        return LLM(model, device=device, dtype=dtype.value, num_blocks=num_blocks, block_size=block_size)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Which hand of cards is dealt.")] = 0,
    width: Annotated[int, typer.Option(min=1, max=64, help="Thoughts that are kept at each level.")] = 6,
    dice: Annotated[bool, typer.Option("--dice", help="Let dice rate the moves, to compare.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a picture that moves.")] = False,
    save_svg: Annotated[Path | None, typer.Option(help="Also write the last picture to this file.")] = None,
    model: Model = "smollm2",
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    num_blocks: Annotated[int, typer.Option(help="Blocks in the pool.")] = 128,
    block_size: BlockSize = 16,
) -> None:
    """Watch the model think in a tree.

    It plays the Game of 24: four cards, each used once, and + - * / must make 24. All legal moves are
    listed, the model rates each one, the best become branches, the others are pruned; level by level until
    one number is left. A checker with exact arithmetic has the last word, and a miss is shown as a miss.

    Beside the tree you see the pages: which blocks are in use, how much the branches share, and what
    contiguous memory would have needed for the same branches.

    \b
    Examples:
      ramet demo                       the hand of seed 0
      ramet demo --seed 3 --width 4    another hand, fewer thoughts
      ramet demo --seed 3 --dice       the same search without the model's opinion
      ramet demo --save-svg demo.svg   keep the picture
    """
    out, err = _consoles()
    if save_svg is not None and not save_svg.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {save_svg} does not exist", param_hint="--save-svg")
    llm = _load(err, model, device, dtype, num_blocks, block_size)
    from ramet.api import demo as view

    view.run(llm, out, seed=seed, width=width, dice=dice, plain=plain, save_svg=save_svg)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    n: Annotated[int, typer.Option("--n", "-n", help="How many choices to make of it.")] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Show the text as it grows.")] = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a choice; repeatable.")] = None,
    model: Model = "smollm2",
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
) -> None:
    """Continue a prompt, in one or several ways at once.

    The prompt is computed once for all choices, and its pages are shared. The text goes to standard output,
    a line of numbers to standard error. With --stream into a pipe, each piece of several choices is a line
    that starts with the choice's number, and line breaks in it are written as \\n.

    \b
    Examples:
      ramet generate "The capital of France is" --temperature 0
      ramet generate "Once upon a time" --n 4 --stream --seed 7
      ramet generate "Q: What is 3 + 4? A:" --stop "Q:" --max-tokens 20
    """
    from ramet.engine.sampling_params import SamplingParams

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
    )
    out, err = _consoles()
    llm = _load(err, model, device, dtype, num_blocks, block_size)
    from ramet.api import generate as view

    view.run(llm, prompt, params, stream=stream, out=out, err=err)


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    seed: Seed = None,
    model: Model = "smollm2",
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
) -> None:
    """Talk with the model; the conversation is a branch.

    Each turn extends the branch, so nothing is computed twice. /undo cuts it back, /fork 3 grows three other
    replies to the last message on branches that share the whole conversation, and you go on with one of them.

    \b
    Examples:
      ramet chat
      ramet chat --system "Answer in one sentence." --temperature 0
      echo "What is a ramet?" | ramet chat
    """
    from ramet.engine.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    out, err = _consoles()
    llm = _load(err, model, device, dtype, num_blocks, block_size)
    from ramet.api import chat as view

    view.run(llm, params, system, out, err)


app.command()(plan)
app.command(context_settings={"auto_envvar_prefix": "RAMET"})(serve)


@app.command()
def bench(
    name: Annotated[Bench, typer.Argument(help="What to measure.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, last on stdout.")] = False,
    device: Annotated[str, typer.Option(help="For attention: where it runs, cpu or cuda.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(help="For memory, attention on cuda: a PNG.")] = None,
) -> None:
    """Measure, and hold the numbers against their targets.

    \b
    radix      forks, matches and evictions of the tree of blocks, beside what others do
    attention  shared pages read once, beside each row reading its own
    memory     waste and residents of paging, beside contiguous memory
    cpu        nine workloads on this CPU, beside transformers and llama.cpp; 15 minutes
    throughput tokens a second at one latency, paged and reserved; some minutes
    serve      HTTP beside the same work in process; some minutes
    search     what searches compute over branches, and as flat requests; some minutes
    beams      how the time of a step of beam search grows with the width; a minute

    A bench that ran exits with 0, whatever it found: the targets say whether the numbers are good.

    \b
    Examples:
      ramet bench radix
      ramet bench attention --device cpu --json | tail -1 | python -m json.tool
      ramet bench memory --plot memory.png
    """
    if plot is not None and (name, device) not in ((Bench.memory, "cpu"), (Bench.attention, "cuda")):
        of = "`ramet bench memory` and `ramet bench attention --device cuda`"
        raise typer.BadParameter(f"is for {of}", param_hint="--plot")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {plot} does not exist", param_hint="--plot")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter("is cpu or cuda", param_hint="--device")
    if device == "cuda" and name is not Bench.attention:
        raise typer.BadParameter("cuda is for `ramet bench attention`", param_hint="--device")
    if device == "cuda" and not _has_cuda():
        raise typer.BadParameter("there is no CUDA device here", param_hint="--device")
    out, _ = _consoles()
    from ramet.api.bench import show

    show(_measure(name, device, plot), as_json=as_json, console=out)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure(name: Bench, device: str, plot: Path | None) -> Report:
    match name:
        case Bench.radix:
            from ramet.api import bench_radix

            return bench_radix.run()
        case Bench.attention:
            from ramet.api import bench_attention

            return bench_attention.run(device, plot)
        case Bench.memory:
            from ramet.api import bench_memory

            return bench_memory.run(plot=plot)
        case Bench.cpu:
            from ramet.api import bench_cpu

            return bench_cpu.run()
        case Bench.throughput:
            from ramet.api import bench_throughput

            return bench_throughput.run()
        case Bench.serve:
            from ramet.api import bench_serve

            return bench_serve.run()
        case Bench.search:
            from ramet.api import bench_search

            return bench_search.run()
        case Bench.beams:
            from ramet.api import bench_beams

            return bench_beams.run()
