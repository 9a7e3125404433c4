"""Any order of questions from two trainers, right and wrong: what is served is one version, as it says."""

import secrets
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from convtools.refit.protocol import Agreed, Committed, Opened, Prepared, Refused
from tests.refit.engines import MODES, Engine, versions_in
from tests.refit.test_receiver import Trainer

WHO = st.integers(0, 1)


class Refits(RuleBasedStateMachine):
    """Two trainers that say whatever they like to one engine."""

    @initialize(mode=st.sampled_from(MODES))
    def begin(self, mode: str) -> None:
        self.mode, self.now = mode, 0.0
        self.engine = Engine(mode)
        self.engine.receiver._clock = lambda: self.now
        self.trainers = [
            Trainer(self.engine, object(), version=10),
            Trainer(self.engine, object(), version=20),
        ]
        self.committed: set[int] = {0}
        self.opened: Any = None

    @rule(who=WHO)
    def agree(self, who: int) -> None:
        assert isinstance(self.trainers[who].agree(), Agreed)

    @rule(who=WHO, ahead=st.integers(-1, 1))
    def open(self, who: int, ahead: int) -> None:
        trainer = self.trainers[who]
        trainer.token = max(1, self.engine.receiver._token + ahead)
        trainer.attempt = secrets.token_bytes(16)
        if isinstance(trainer.open(), Opened):
            assert ahead == 1 or self.engine.receiver._token == 1
            self.opened = trainer

    @rule(who=WHO, which=st.integers(0, 4), flip=st.booleans())
    def bucket(self, who: int, which: int, flip: bool) -> None:
        trainer = self.trainers[who]
        which %= len(trainer.plan.buckets)
        answer = trainer.bucket(which, **({"checksum": bytes(16)} if flip else {}))
        assert not flip or isinstance(answer, Refused)

    @rule(who=WHO)
    def all_buckets(self, who: int) -> None:
        for i in range(len(self.trainers[who].plan.buckets)):
            self.trainers[who].bucket(i)

    @rule(who=WHO)
    def prepare(self, who: int) -> None:
        trainer = self.trainers[who]
        if isinstance(trainer.prepare(), Prepared):
            assert trainer is self.opened
            current = self.engine.receiver._transaction
            assert current is not None and len(current.seen) == len(trainer.plan.buckets)

    @rule(who=WHO)
    def commit(self, who: int) -> None:
        trainer = self.trainers[who]
        answer = trainer.commit()
        if isinstance(answer, Committed):
            assert trainer is self.opened and answer.version == trainer.version
            self.committed.add(trainer.version)

    @rule(who=WHO)
    def abort(self, who: int) -> None:
        self.trainers[who].abort()

    @rule(who=WHO)
    def lost(self, who: int) -> None:
        self.engine.receiver.lost(self.trainers[who].owner)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.engine.receiver.expire()

    @invariant()
    def never_a_mix(self) -> None:
        receiver = self.engine.receiver
        served = self.engine.look()
        assert not self.engine.mixes and receiver.version in self.committed
        assert served in (None, receiver.version)
        if receiver.state == "clean":
            assert served == receiver.version and versions_in(self.engine.tensors) == {float(served)}
            assert receiver._transaction is None
        elif receiver.state == "poisoned":
            assert self.mode == "quarantine" and served is None and receiver._transaction is None
        else:
            assert receiver._transaction is not None
            assert served is None or self.mode == "shadow"

    def teardown(self) -> None:
        for trainer in getattr(self, "trainers", ()):
            trainer.ring.close()


TestRefits = Refits.TestCase
TestRefits.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
