"""How a beam search ranks its beams and when it ends: plain values, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ramet.engine.checks import check_float, check_int
from ramet.engine.errors import InvalidInput
from ramet.engine.sampling_params import SamplingParams

MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 10.0  # a length to this power is still a number
Scoring = Literal["hf", "raw"]

# What a beam search has in common with sampling; SamplingParams says what each means and checks it.
SHARED_FIELDS = (
    "max_tokens", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "banned_token_ids", "stop", "stop_token_ids", "ignore_eos", "logprobs",
    "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Raises InvalidInput, which names the field and its limit, for any value outside of what is said here.

    The defaults and their meaning are those of transformers' `generate(num_beams=...)`.

    Attributes:
        num_beams: how many beams run side by side, 1 to 256; 1 is greedy, by log-probabilities as below.
        num_return_sequences: how many of the best to return, 1 to num_beams; None is all.
        length_penalty: a beam's score is the sum of its log-probabilities over this power of the number of
            its generated tokens, an end token included; -10 to 10. At 0 the sums are compared; the higher it
            is, the better for long beams.
        early_stopping: when to end, once num_beams beams are complete. True: at once. False: when the best
            running beam, were it complete now, would not be among them. "never": when no running beam can
            come to be among them, however long it gets.
        scoring: "hf" as above; "raw" ranks by the sum alone, whatever length_penalty says.

    The other fields are those of SamplingParams. Biases and penalties act on log-probabilities here, and show
    in the scores; the log-probabilities that are reported are the model's own.
    """

    num_beams: int = 4
    num_return_sequences: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    scoring: Scoring = "hf"
    max_tokens: int | None = 64
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    tokens: SamplingParams = field(init=False, repr=False, compare=False)  # which tokens may come, and end it

    def __post_init__(self) -> None:
        check_int("num_beams", self.num_beams, 1, MAX_BEAMS)
        if self.num_return_sequences is not None:
            check_int("num_return_sequences", self.num_return_sequences, 1, int(self.num_beams))
        check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidInput("early_stopping", 'must be true, false or "never"', self.early_stopping)
        if not isinstance(self.scoring, str) or self.scoring not in get_args(Scoring):
            raise InvalidInput("scoring", 'must be "hf" or "raw"', self.scoring)
        tokens = SamplingParams(temperature=0.0, **{name: getattr(self, name) for name in SHARED_FIELDS})
        # As in SamplingParams: plain numbers, and nothing that a caller could change later.
        frozen: dict[str, Any] = {name: getattr(tokens, name) for name in SHARED_FIELDS}
        frozen |= {"num_beams": int(self.num_beams), "length_penalty": float(self.length_penalty)}
        if self.num_return_sequences is not None:
            frozen["num_return_sequences"] = int(self.num_return_sequences)
        for name, value in {**frozen, "tokens": tokens}.items():
            object.__setattr__(self, name, value)

    @property
    def num_returned(self) -> int:
        return self.num_beams if self.num_return_sequences is None else self.num_return_sequences

    @property
    def length_exponent(self) -> float:
        """The power of a beam's length that its sum is divided by."""
        return self.length_penalty if self.scoring == "hf" else 0.0
