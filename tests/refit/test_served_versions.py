"""What a version means: the weights that it was committed with, and a self-test changes neither."""

from typing import Any

import numpy as np
import pytest

from convtools.errors import UsageError
from convtools.refit.applier import ShadowApplier
from convtools.refit.errors import RefitError
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.engines import MODES, Engine, model, refill

FIX = "push first, or give check a version"


def synced(source: Any, *engines: Engine, **options: Any) -> WeightSync:
    sinks = [DirectSink(e.receiver, str(i)) for i, e in enumerate(engines)]
    return WeightSync(source, sinks, bucket_bytes=4096, **options)


@pytest.mark.parametrize("mode", MODES)
def test_the_self_test_does_not_change_what_is_served(mode: str) -> None:
    engine, source = Engine(mode), model(1)
    with synced(source, engine) as sync:
        with pytest.raises(UsageError, match="the engine does not serve the source's weights") as caught:
            sync.check()
        assert caught.value.fix == FIX and "`0`: 7 tensors differ" in str(caught.value.found)
        assert (engine.look(), engine.receiver._token, engine.receiver.state) == (0, 0, "clean")
        sync.push(1)
        assert sync.check().ok and engine.look() == 1
        refill(source, 2)
        with pytest.raises(UsageError, match="does not serve"):
            sync.check()
        assert engine.look() == 1 and not engine.mixes
        assert sync.check(version=2).ok and engine.look() == 2
        refill(source, 3)
        with pytest.raises(RefitError, match="version 2 is served with other weights"):
            sync.check(version=2)
        for version in (-1, True, "3"):
            with pytest.raises(UsageError, match="a step of the trainer"):
                sync.check(version=version)  # type: ignore[arg-type]


def test_the_self_test_of_sinks_that_serve_several_versions() -> None:
    engines, source = [Engine(), Engine()], model(1)
    with synced(source, engines[0]) as sync:
        sync.push(1)
    with synced(source, engines[1]) as sync:
        sync.push(2)
    refill(source, 1)
    with synced(source, *engines) as sync:
        with pytest.raises(UsageError, match="the sinks serve several versions") as caught:
            sync.check()
        assert caught.value.found == "`0` clean at version 1, `1` clean at version 2"
        sync.push(3)
        assert sync.check().ok


def test_a_sink_that_serves_nothing_is_not_tested() -> None:
    engine = Engine()
    engine.receiver = Receiver(engine.applier, state="poisoned")
    with synced(model(0), engine) as sync:
        with pytest.raises(UsageError, match="does not serve") as caught:
            sync.check()
        assert "`0`: it is poisoned, and serves nothing" in str(caught.value.found)


@pytest.mark.parametrize("mode", MODES)
def test_other_weights_under_the_version_that_is_served(mode: str) -> None:
    engine, source = Engine(mode), model(1)
    with synced(source, engine) as sync:
        sync.push(1)
        sync.push(1)  # the very same
        source["head"][3, 1] = 7
        for _ in range(2):  # also where an abort left a mix: the version still means what it meant
            with pytest.raises(RefitError, match="version 1 is served with other weights") as caught:
                sync.push(1)
            assert caught.value.fix == "push a new version, or with force (--force)"
            assert str(caught.value.found).startswith("1 tensors differ: `head`; now `0` ")
            assert engine.look() == (1 if mode != "quarantine" else None) and not engine.mixes
        source["head"][3, 1] = 1
        sync.push(1)
        assert engine.look() == 1
        source["head"][3, 1] = 7
        sync.push(1, force=True)
        assert engine.tensors["head"][3, 1] == 7 and sync.verify().equal
        sync.push(1)
        source["head"][3, 1] = 8
        sync.push(2)
        assert engine.tensors["head"][3, 1] == 8


def test_where_there_are_no_fingerprints_a_version_is_taken_at_its_word() -> None:
    engine, source = Engine(), model(1)
    with synced(source, engine) as sync:
        sync.push(1)
    source["head"][3, 1] = 7
    with synced(source, engine, fingerprints=False) as sync:
        sync.push(1)
    source["head"][3, 1] = 8
    with synced(source, engine) as sync:  # of the last commit nothing is known
        sync.push(1)
    assert engine.tensors["head"][3, 1] == 8


def test_a_tied_tensor_is_known_under_either_name() -> None:
    embed = np.zeros((4, 4), "f4")
    receiver = Receiver(ShadowApplier(TensorWeights({"embed": embed, "head": embed})))
    for name, value, fine in (("embed", 1, True), ("head", 1, True), ("head", 2, False)):
        with WeightSync({name: np.full((4, 4), value, "f4")}, [DirectSink(receiver)]) as sync:
            if fine:
                sync.push(1)
            else:
                with pytest.raises(RefitError, match="served with other weights"):
                    sync.push(1)
    assert (embed == 1).all()


def test_a_version_is_lowered_by_force_only_and_it_says_so() -> None:
    engine = Engine()
    with synced(model(5), engine) as sync:
        sync.push(5)
        with pytest.raises(RefitError, match="a version is never lowered") as caught:
            sync.push(4)
        assert caught.value.fix == "push a higher version, or with force (--force)"
        assert (caught.value.expected, caught.value.found) == (">= 5", "4; now `0` clean at version 5")
