"""The command line: help that answers at once, errors in one line, and the commands on the embedded model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from ramet import LLM, SamplingParams
from ramet.api import bench_attention, cli
from ramet.api.bench import Report
from ramet.api.chat import Conversation
from ramet.api.generate import run as run_generate
from ramet.engine.errors import InvalidInput, ModelNotFound
from ramet.testing import check_idle, check_invariants

Ran = tuple[int, str, str]
Run = Callable[..., Ran]


@pytest.fixture
def ramet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line as the installed program would; gives its status, stdout and stderr."""

    def run(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["ramet", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "110")
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err

    return run


@pytest.fixture
def loaded(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get the model that is loaded already."""
    monkeypatch.setattr(cli, "_load", lambda *_: smollm2)
    return smollm2


# -- help and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), ("demo",), ("generate",), ("chat",), ("bench",)])
def test_help_teaches(ramet: Run, command: tuple[str, ...]) -> None:
    status, out, err = ramet(*command, "--help")
    assert (status, err) == (0, "")
    assert "Usage: ramet" in out
    if command:
        assert f"  ramet {command[0]}" in out, "an example"


def test_alone_it_shows_the_commands(ramet: Run) -> None:
    status, out, _ = ramet()
    assert status == 0
    assert all(name in out for name in ("demo", "generate", "chat", "bench"))


def test_version(ramet: Run) -> None:
    assert ramet("--version") == (0, f"ramet {version('ramet')}\n", "")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from ramet.api import cli; sys.argv = ['ramet', 'demo', '--help']\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nonsense"], 2, "nonsense"),
        (["generate"], 2, "prompt"),
        (["generate", "x", "--n", "0"], 2, "n must be between 1 and 128, got 0"),
        (["generate", "x", "--n", "many"], 2, "'--n'"),
        (["generate", "x", "--top-p", "2"], 2, "top_p must be between 0 and 1, got 2.0"),
        (["generate", "x", "--model", "/no/such/model.gguf"], 1, "there is no such file"),
        (["generate", "x", "--block-size", "0", "--num-blocks", "8"], 2, "block_size must be between"),
        (["chat", "--temperature", "-1"], 2, "temperature must be a finite number >= 0"),
        (["demo", "--width", "0"], 2, "width"),
        (["demo", "--save-svg", "/no/such/folder/x.svg"], 2, "does not exist"),
        (["bench", "speed"], 2, "speed"),
        (["bench", "radix", "--plot", "x.png"], 2, "ramet bench memory"),
        (["bench", "memory", "--plot", "/nowhere/x.png"], 2, "folder"),
        (["bench", "attention", "--device", "tpu"], 2, "cpu"),
        (["bench", "radix", "--device", "cuda"], 2, "bench attention"),
    ],
)
def test_an_error_is_one_line(ramet: Run, arguments: list[str], status: int, words: str) -> None:
    got, out, err = ramet(*arguments)
    assert (got, out) == (status, "")
    [line] = [line for line in err.splitlines() if not line.startswith("loading")]
    assert line.startswith("ramet: ") and words in line


def test_a_missing_extra_says_how_to_get_it(ramet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ramet.api.server.run", None)
    status, _, err = ramet("serve")
    assert status == 2 and "pip install '.[serve]'" in err and "pip install 'ramet[serve]'" in err


def test_a_missing_model_says_how_to_get_it(ramet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> LLM:
        raise ModelNotFound("smollm2", "run `make model`")

    monkeypatch.setattr(cli, "_load", missing)
    assert ramet("demo") == (1, "", "ramet: model 'smollm2' was not found: run `make model`\n")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 0)])
def test_being_stopped_is_quiet(
    ramet: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], status: int
) -> None:
    def stopped(*_: object) -> LLM:
        raise error

    monkeypatch.setattr(cli, "_load", stopped)
    got, _, err = ramet("chat")
    assert (got, err) == (status, "")


def test_a_bug_keeps_its_trace(ramet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> LLM:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "_load", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        ramet("chat")


def test_a_bench_exits_with_0_and_its_json_is_last(ramet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: str, plot: object) -> Report:
        report = Report("attention", metrics={"speed": 1.0})
        report.target("speed", ">=", 3.0)
        return report

    monkeypatch.setattr(bench_attention, "run", run)
    status, out, _ = ramet("bench", "attention", "--json")
    assert status == 0
    assert json.loads(out.splitlines()[-1])["targets"][0]["met"] is False
    status, out, _ = ramet("bench", "attention")
    assert status == 0 and "speed" in out


# -- generate ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_generate_prints_the_text_and_one_line_of_numbers(ramet: Run, loaded: LLM) -> None:
    options = ["--temperature", "0", "--max-tokens", "6"]
    expected = loaded.generate("The capital of France is", temperature=0, max_tokens=6)[0].choices[0].text
    for stream in ([], ["--stream"]):
        status, out, err = ramet("generate", "The capital of France is", *options, *stream)
        assert (status, out) == (0, expected + "\n")
        [line] = err.splitlines()
        assert "5 prompt tokens" in line and "6 generated" in line
    check_idle(loaded)


@pytest.mark.model
def test_streamed_pieces_of_several_choices_join_to_their_texts(ramet: Run, loaded: LLM) -> None:
    options = ["--n", "3", "--seed", "7", "--max-tokens", "8"]
    choices = loaded.generate("Once upon a time", n=3, seed=7, max_tokens=8)[0].choices
    _, out, _ = ramet("generate", "Once upon a time", *options, "--stream")
    joined = ["", "", ""]
    for line in out.splitlines():
        joined[int(line[1])] += line[4:].replace("\\n", "\n")
    assert joined == [choice.text for choice in choices]
    _, out, _ = ramet("generate", "Once upon a time", *options)
    assert all(choice.text in out for choice in choices) and out.startswith("0: 8 tokens, length\n")


@pytest.mark.model
def test_on_a_terminal_the_choices_grow_in_place(smollm2: LLM) -> None:
    out, err = io.StringIO(), io.StringIO()
    params = SamplingParams(n=2, seed=1, max_tokens=5)
    run_generate(
        smollm2,
        "Once upon a time",
        params,
        stream=True,
        out=Console(file=out, force_terminal=True, width=80),
        err=Console(file=err),
    )
    assert "1: 5 tokens, length" in out.getvalue()
    check_idle(smollm2)


# -- chat --------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=12)
QUESTION = "What is the capital of France?"


@pytest.mark.model
def test_chat_reads_a_pipe(ramet: Run, loaded: LLM) -> None:
    lines = [
        QUESTION,
        "/stats",
        "/undo",
        "/undo",
        QUESTION,
        "/fork 2",
        "2",
        "/fork 2",
        "",
        "/nope",
        "/fork x",
    ]
    status, out, err = ramet("chat", "--temperature", "0", "--max-tokens", "12", stdin="\n".join(lines))
    assert status == 0
    assert out.count("Paris") >= 2, "the question was asked twice"
    assert "1: " in out and "2: " in out
    for words in ("tokens in", "taken back", "no turn to take back", "going on with 2", "the old reply"):
        assert words in err
    assert "/undo  " in err and "ramet: /fork takes the number of replies" in err
    check_idle(loaded)


@pytest.mark.model
def test_chat_refuses_what_does_not_fit_and_goes_on(ramet: Run, loaded: LLM) -> None:
    stdin = f"{'word ' * 9000}\n{QUESTION}\n"
    status, out, err = ramet("chat", "--temperature", "0", "--max-tokens", "12", stdin=stdin)
    assert status == 0 and "Paris" in out
    assert next(line for line in err.splitlines() if line).startswith("ramet: the request needs")
    check_idle(loaded)


@pytest.mark.model
def test_a_turn_computes_only_what_is_new(smollm2: LLM) -> None:
    conversation = Conversation(smollm2, SamplingParams(temperature=0, max_tokens=40))
    pieces: list[str] = []
    reply = conversation.ask(QUESTION, pieces.append)
    assert "".join(pieces) == reply and "Paris" in reply
    branch = conversation.branch
    assert branch is not None
    computed, length = smollm2.stats().num_computed_tokens, len(branch)
    conversation.ask("And of Italy?")
    assert conversation.branch is branch, "the template agrees with what was generated"
    # All but the last token go through the model once; that of the first reply was still to be fed.
    assert smollm2.stats().num_computed_tokens - computed == len(branch) - length
    assert smollm2.tokenizer is not None
    again = smollm2.tokenizer.apply_chat_template(conversation.messages, add_generation_prompt=False)
    assert again[: len(branch)] == branch.token_ids
    conversation.reset()
    check_idle(smollm2)


@pytest.mark.model
def test_undo_and_fork_leave_a_conversation_as_if_it_had_gone_so(smollm2: LLM) -> None:
    conversation = Conversation(smollm2, GREEDY, system="Answer briefly.")
    first = conversation.ask(QUESTION)
    second = conversation.ask("And of Italy?")
    assert conversation.undo() and len(conversation.messages) == 3
    assert conversation.ask("And of Italy?") == second
    replies = conversation.replies(3)
    assert [reply.output.text for reply in replies if reply.output] == [second] * 3, "greedy"
    check_invariants(smollm2)
    assert conversation.choose(replies[1]) == second
    assert conversation.undo() and conversation.undo() and not conversation.undo()
    assert conversation.ask(QUESTION) == first
    conversation.reset()
    check_idle(smollm2)


@pytest.mark.model
def test_an_interrupted_reply_stays_as_far_as_it_came(smollm2: LLM) -> None:
    conversation = Conversation(smollm2, SamplingParams(temperature=0, max_tokens=40))

    def interrupt(text: str) -> None:
        if "capital" in text:
            raise KeyboardInterrupt

    reply = conversation.ask(QUESTION, interrupt)
    assert reply.endswith("capital")
    assert "Paris" in conversation.ask("Go on.") or conversation.num_turns == 2
    conversation.reset()
    check_idle(smollm2)


def test_a_model_without_a_template_cannot_chat(make_tiny: Callable[..., LLM]) -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        Conversation(make_tiny(), GREEDY)


def test_the_installed_program_is_this_one() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert 'ramet = "ramet.api.cli:main"' in text
