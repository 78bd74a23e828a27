"""`ramet chat`: a conversation on one branch; /undo truncates it, /fork grows several replies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from ramet.engine.branch import Branch
from ramet.engine.errors import InvalidInput, RametError
from ramet.engine.llm import LLM
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.tokenizer import IncrementalDetokenizer, Tokenizer

HELP = """\
/undo      take back the last turn: the branch is cut, nothing is computed again
/fork N    N other replies to the last message, on N branches that share all the rest; pick one
/reset     start again
/stats     what the pages hold
/quit      leave (or Ctrl-D); Ctrl-C stops a reply"""


class Conversation:
    """Messages, and one branch that holds their tokens."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise InvalidInput("model", "cannot chat: it has no chat template")
        self.llm = llm
        self.params = params
        self._tokenizer = llm.tokenizer
        self.branch: Branch | None = None
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)
        self._turns: list[tuple[int, int]] = []  # the branch's length before each turn, and at its reply

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def ask(self, text: str, on_text: Callable[[str], None] = lambda text: None) -> str:
        """Say something and generate the reply; `on_text` gets it piece by piece.

        An interrupt ends the reply where it is.
        """
        self.messages.append({"role": "user", "content": text})
        before = len(self.branch) if self.branch is not None else 0
        try:
            branch = self._follow()
            start = len(branch)
            self._reply(branch, on_text)
        except BaseException:
            self._forget(before)
            raise
        self._turns.append((before, start))
        return self._take_reply(branch, start)

    def _reply(self, branch: Branch, on_text: Callable[[str], None]) -> None:
        start = len(branch)
        with _heard(branch, self._tokenizer, on_text):
            try:
                branch.generate(self._params())
            except KeyboardInterrupt:
                if len(branch) == start:
                    raise

    def replies(self, n: int) -> list[Branch]:
        """`n` other replies to the last message, each on its own branch; `choose` one or `discard` them."""
        if self.branch is None or not self._turns:
            raise InvalidInput("/fork", "needs a message to reply to")
        start = self._turns[-1][1]
        [stem] = self.branch.fork(at=start)
        try:
            return stem.expand(params=replace(self._params(), n=n))
        except BaseException:
            stem.prune()
            raise

    def choose(self, reply: Branch) -> str:
        """Go on with one of `replies`; the others and the old reply are pruned."""
        assert self.branch is not None and reply.parent is not None, "replies come from a conversation"
        reply.promote()
        old, self.branch = self.branch, reply
        # The stem and the old reply are let go of, their shared past stays with the new one.
        reply.parent.release()
        old.release()
        self.messages.pop()
        return self._take_reply(reply, self._turns[-1][1])

    def discard(self, replies: list[Branch]) -> None:
        stem = replies[0].parent
        assert stem is not None, "replies come from a conversation"
        stem.prune()

    def undo(self) -> bool:
        """Take the last turn back; False if there is none."""
        if not self._turns:
            return False
        before, _ = self._turns.pop()
        del self.messages[-2:]
        self._cut(before)
        return True

    def reset(self) -> None:
        self._cut(0)
        self._turns.clear()
        self.messages = list(self._system)

    def _follow(self) -> Branch:
        """The branch, with all messages on it.

        What the model wrote is tokens already; only where the template's text differs from them, say because
        a reply was cut short, a new branch is made, and the cache gives it the part that agrees.
        """
        token_ids = self._tokenizer.apply_chat_template(self.messages)
        branch = self.branch
        if branch is not None and token_ids[: len(branch)] == branch.token_ids:
            branch.extend(token_ids[len(branch) :])
            return branch
        self.branch = self.llm.branch(token_ids)
        if branch is not None:
            branch.release()
        return self.branch

    def _take_reply(self, branch: Branch, start: int) -> str:
        text = self._tokenizer.decode(branch.token_ids[start:])
        self.messages.append({"role": "assistant", "content": text})
        return text

    def _forget(self, before: int) -> None:
        """A message that got no reply leaves no trace."""
        self.messages.pop()
        if self.branch is not None:
            self._cut(min(before, len(self.branch)))

    def _cut(self, position: int) -> None:
        if self.branch is None:
            return
        if position > 0:
            self.branch.truncate(position)
        else:
            self.branch.release()
            self.branch = None

    def _params(self) -> SamplingParams:
        """A seed of its own for each turn, so that the same question again can get another answer."""
        seed = self.params.seed
        return self.params if seed is None else replace(self.params, seed=seed + len(self._turns))


@contextmanager
def _heard(branch: Branch, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> Iterator[None]:
    """Hand on the text of a branch as it grows."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    done = len(branch)

    def listen() -> None:
        nonlocal done
        new = branch.token_ids[done:]
        done += len(new)
        if text := "".join(map(detokenizer.add, new)):
            on_text(text)

    stop_listening = branch.llm.on_step(listen)
    try:
        yield
    finally:
        stop_listening()
        if text := detokenizer.flush():
            on_text(text)


# -- the terminal ------------------------------------------------------------------------------------------


class Chat:
    """Reads lines, prints replies as they come."""

    def __init__(self, conversation: Conversation, out: Console, err: Console) -> None:
        self._conversation = conversation
        self._out = out
        self._err = err

    def run(self) -> None:
        """Until /quit or the end of the input."""
        if sys.stdin.isatty():
            import readline  # noqa: F401  # gives input() its line editing

            self._err.print(HELP, style="dim", highlight=False)
        while (line := self._read("> ")) is not None and line != "/quit":
            try:
                self._do(line)
            except KeyboardInterrupt:
                self._err.print("stopped", style="dim")
            except RametError as error:
                self._err.print(Text(f"ramet: {error}", style="red"), soft_wrap=True)
        self._conversation.reset()

    def _read(self, prompt: str) -> str | None:
        try:
            return input(prompt if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""

    def _do(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                return
            case "/undo":
                self._say("taken back" if self._conversation.undo() else "there is no turn to take back")
            case "/reset":
                self._conversation.reset()
                self._say("a new conversation")
            case "/stats":
                self._stats()
            case "/fork":
                self._fork(rest)
            case _ if command.startswith("/"):
                self._say(HELP)
            case _:
                self._conversation.ask(line, self._write)
                self._write("\n")

    def _fork(self, count: str) -> None:
        if not count.isdecimal() or int(count) < 1:
            raise InvalidInput("/fork", "takes the number of replies, as in /fork 3")
        replies = self._conversation.replies(int(count))
        for number, reply in enumerate(replies, 1):
            assert reply.output is not None, "a reply was generated"
            self._write(f"{number}: {reply.output.text}\n")
        self._stats()
        picked = self._read(f"go on with which (1 to {len(replies)}; Enter keeps the old one)? ")
        if picked and picked.isdecimal() and 1 <= int(picked) <= len(replies):
            self._conversation.choose(replies[int(picked) - 1])
            self._say(f"going on with {picked}; the others are pruned")
        else:
            self._conversation.discard(replies)
            self._say("going on with the old reply")

    def _stats(self) -> None:
        stats = self._conversation.llm.stats()
        pages = stats.pages
        self._say(
            f"{pages.logical_tokens} tokens in {pages.num_in_use} blocks of {pages.block_size}, shared "
            f"{pages.sharing_ratio:.1f} times; {pages.num_cached_idle} cached idle, {pages.num_free} free; "
            f"{stats.num_computed_tokens} tokens computed, {stats.num_cached_tokens} found in the cache"
        )

    def _say(self, text: str) -> None:
        self._err.print(text, style="dim", highlight=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        self._out.print(Text(text), end="", soft_wrap=True)
        self._out.file.flush()


def run(llm: LLM, params: SamplingParams, system: str | None, out: Console, err: Console) -> None:
    Chat(Conversation(llm, params, system), out, err).run()
