"""Calls that all ranks make together: the lead does it, the others serve it, and all learn the outcome."""

from collections.abc import Callable, Sequence
from typing import Any

from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.ranks import steps
from convtools.refit.ranks.group import RankGroup


class InStep:
    """A rank's part of such calls; what a pass over its tensors is, others say."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.patience = group.timeout
        """How long the others wait for the lead's next word."""
        self.serve: Callable[[int], None] = lambda _: None
        """A follower's part of a bucket."""
        self.tell_values: Callable[[int], None] = lambda _: None
        """Its part of an exchange of fingerprints."""
        self._number, self._inside, self._mismatch = 0, False, ""

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the sinks."""
        return self.group.leads

    def _begin_quietly(self) -> None:
        """A pass begins, on a follower."""
        raise NotImplementedError

    def _end(self) -> None:
        """A pass is over."""
        raise NotImplementedError

    def together(self, what: str, args: Sequence[int | bool | str | None], run: Callable[[], Any]) -> Any:
        """One call of all ranks: the lead does it, the others serve it; all get its report or its error."""
        if self._inside:  # a part of another call
            return run()
        self._inside, self._mismatch = True, ""
        self._number += 1
        call = steps.Call(what, tuple(args), self.patience)
        try:
            return self._lead(call, run) if self.leads else self._follow(call)
        finally:
            self._inside = False
            self._end()

    def _lead(self, call: steps.Call, run: Callable[[], Any]) -> Any:
        outcome: steps.Outcome | None = None
        try:
            self.group.command(steps.CALL, payload=steps.encode(call))
            report = run()
            outcome = steps.outcome_of(call.what, report)
            return report
        except BaseException as error:
            outcome = steps.Outcome(call.what, failure=steps.failure_of(error))
            raise
        finally:
            self._tell(steps.encode(outcome))

    def _tell(self, word: bytes) -> None:
        """The outcome, to all; where the group is broken, it is left for them, and they are woken."""
        try:
            self.group.command(steps.DONE, payload=word)
        except RefitError:
            self.group.last_word(self._number, word)
            self.group.close()

    def _follow(self, call: steps.Call) -> Any:
        patience = self.group.timeout
        try:
            while True:
                kind, value, payload = self.group.told(patience, payloads=steps.WITH_PAYLOAD)
                if kind == steps.CALL:
                    theirs = steps.decode(payload, steps.Call)
                    patience = theirs.patience
                    if (theirs.what, theirs.args) != (call.what, call.args):
                        self._mismatch = f"rank 0 called {theirs}, rank {self.group.rank} {call}"
                elif kind == steps.BEGIN:
                    self._begin_quietly()
                elif kind == steps.BUCKET:
                    self.serve(value)
                elif kind == steps.VALUES:
                    self.tell_values(value)
                elif kind == steps.END:
                    self._end()
                elif kind == steps.DONE:
                    return self._outcome(payload)
        except RefitError:
            word = self.group.find_last_word(self._number) if self.group.broken else None
            if word is None:
                raise
        return self._outcome(word)

    def _outcome(self, word: bytes) -> Any:
        report = steps.report_of(steps.decode(word, steps.Outcome))
        if self._mismatch:
            raise UsageError("the ranks do different things", found=self._mismatch)
        return report
