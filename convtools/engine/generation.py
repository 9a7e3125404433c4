"""Tokens from a model: a loop of our own, which can stop between two tokens and go on under other weights."""

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from convtools.engine.prefixes import PrefixCache
from convtools.engine.traffic import Traffic
from convtools.errors import ConvtoolsError, UsageError

if TYPE_CHECKING:
    import torch

MAX_ROWS = 256
MAX_NEW_TOKENS = 1 << 16

_Token = Annotated[int, Meta(ge=0, le=1 << 31)]
_Row = Annotated[list[_Token], Meta(min_length=1, max_length=1 << 17)]


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be generated; as JSON, the body of POST /generate."""

    input_ids: Annotated[list[_Row | _Token], Meta(min_length=1, max_length=1 << 17)]
    """Several prompts, or the tokens of one."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)] = 16
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0 is greedy."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] | None = None
    """Makes sampling repeatable; each prompt of a request draws its own numbers from it."""
    stop_ids: Annotated[list[_Token], Meta(max_length=64)] = []
    """A prompt's answer ends with the first of these. None by default, not even the model's own."""


class Generated(Struct, frozen=True):
    """The answer, a list for each prompt."""

    ids: list[list[int]]
    """Tokens."""
    logprobs: list[list[float]]
    """Of each token, as the model says them: before temperature."""
    versions: list[list[int]]
    """Of the weights that made each token."""


@dataclass
class _Rows:
    """Prompts of one length, generated together."""

    at: list[int]
    """Which of the request's prompts they are."""
    prompts: tuple[tuple[int, ...], ...]
    draws: "list[torch.Generator]"
    tokens: list[list[int]] = field(init=False)
    logprobs: list[list[float]] = field(init=False)
    versions: list[list[int]] = field(init=False)
    done: list[bool] = field(init=False)
    states: Any = None
    """KV and recurrent states after all tokens but the last; None to be made anew."""

    def __post_init__(self) -> None:
        self.tokens, self.logprobs = [[] for _ in self.at], [[] for _ in self.at]
        self.versions, self.done = [[] for _ in self.at], [False for _ in self.at]


class Generator:
    """Generates with one model, for several threads."""

    def __init__(self, model: Any, traffic: Traffic, prefixes: PrefixCache) -> None:
        self._model, self._traffic, self._prefixes = model, traffic, prefixes
        config = model.config.get_text_config()
        self.vocab = int(config.vocab_size)
        """Tokens are below it."""
        self.context = int(getattr(config, "max_position_embeddings", None) or 4096)
        """Tokens of a prompt and its answer."""
        takes = inspect.signature(model.forward).parameters
        self._states = "cache" if "cache" in takes else "past_key_values"  # it changed its name in 5.2x
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._lock = threading.Lock()

    def generate(self, request: Request) -> Generated:
        """Raises UsageError for what the model cannot take, NotServing where no weights are served.

        Under the policies drain and abort all of an answer is of one version. Under keep a push may come
        between two tokens: what was read so far is then read again under the new weights.
        """
        many = self._prompts(request)
        groups = self._groups(many, request.seed)
        left = [rows for rows in groups if not all(rows.done)]
        while left:
            with self._traffic.enter() as visit:
                while left:
                    self._step(left[0], request, visit.version)
                    if all(left[0].done):
                        left.pop(0)
                    if left and visit.must_leave():
                        break
            for rows in left:
                rows.states = None
        out = Generated([[] for _ in many], [[] for _ in many], [[] for _ in many])
        for rows in groups:
            for i, at in enumerate(rows.at):
                out.ids[at], out.logprobs[at] = rows.tokens[i], rows.logprobs[i]
                out.versions[at] = rows.versions[i]
        return out

    def _prompts(self, request: Request) -> list[list[int]]:
        prompts, more = [i for i in request.input_ids if isinstance(i, list)], request.max_new_tokens
        if tokens := [i for i in request.input_ids if not isinstance(i, list)]:
            if prompts:
                raise UsageError("`input_ids` has tokens beside prompts")
            prompts = [tokens]
        if len(prompts) > MAX_ROWS:
            raise UsageError("too many prompts", expected=f"at most {MAX_ROWS}", found=len(prompts))
        if (most := max(map(len, prompts)) + more) > self.context:
            raise UsageError(
                "prompt and answer are too long", expected=f"at most {self.context} tokens", found=most
            )
        if (token := max(map(max, prompts))) >= self.vocab:
            raise UsageError("a token is not of the vocabulary", expected=f"below {self.vocab}", found=token)
        return prompts

    def _groups(self, prompts: list[list[int]], seed: int | None) -> list[_Rows]:
        import torch

        by_length: dict[int, list[int]] = {}
        for at, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(at)
        out = []
        for ats in by_length.values():
            draws = [torch.Generator() for _ in ats]
            for draw, at in zip(draws, ats, strict=True):
                if seed is None:
                    draw.seed()
                else:
                    draw.manual_seed((seed * 1_000_003 + at) % (1 << 63))
            out.append(_Rows(ats, tuple(tuple(prompts[at]) for at in ats), draws))
        return out

    def _step(self, rows: _Rows, request: Request, version: int) -> None:
        """One more token for each prompt that is not done; the others' are computed and thrown away."""
        import torch

        with torch.inference_mode():
            logits = self._logits(rows)
            if not torch.isfinite(logits).all():
                raise ConvtoolsError("the model's logits are not finite")
            logprobs = torch.log_softmax(logits, -1)
            drawn = self._draw(logits, rows.draws, request.temperature)
        for i, token in enumerate(drawn):
            rows.tokens[i].append(token)
            if rows.done[i]:
                continue
            rows.logprobs[i].append(float(logprobs[i, token]))
            rows.versions[i].append(version)
            rows.done[i] = len(rows.versions[i]) == request.max_new_tokens or token in request.stop_ids
        if all(rows.done):
            rows.states = None
            for i, versions in enumerate(rows.versions):
                del rows.tokens[i][len(versions) :]

    def _logits(self, rows: _Rows) -> "torch.Tensor":
        """Of the next tokens: from the states, or from all tokens so far where there are none."""
        if rows.states is not None:
            last = [[tokens[-1]] for tokens in rows.tokens]
            logits, rows.states = self._forward(last, rows.states)
            return logits
        new = not rows.tokens[0]
        if new and (found := self._prefixes.get(rows.prompts)) is not None:
            rows.states = found[1]
            return found[0]
        so_far = [[*p, *t] for p, t in zip(rows.prompts, rows.tokens, strict=True)]
        logits, rows.states = self._forward(so_far, None)
        if new:
            self._prefixes.put(rows.prompts, logits, rows.states)
        return logits

    def _forward(self, tokens: Sequence[Sequence[int]], states: Any) -> "tuple[torch.Tensor, Any]":
        import torch

        given = {} if states is None else {self._states: states}
        with self._lock:  # two at once would only share the same cores
            out = self._model(input_ids=torch.tensor(tokens), use_cache=True, **given, **self._last)
        return out.logits[:, -1].to(torch.float32, copy=True), getattr(out, self._states)

    def _draw(self, logits: "torch.Tensor", draws: "list[torch.Generator]", temperature: float) -> list[int]:
        import torch

        if temperature == 0:
            return [int(token) for token in logits.argmax(-1)]
        # Far apart from each other, and none above 0: no temperature is too low to divide by.
        below = (logits - logits.amax(-1, keepdim=True)).double()
        chances = torch.softmax(below / temperature, -1)
        return [
            int(torch.multinomial(row, 1, generator=draw)) for row, draw in zip(chances, draws, strict=True)
        ]
