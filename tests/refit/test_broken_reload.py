"""The file channel with two trainers at once, and names that are symlinks or somebody else's."""

import os
from pathlib import Path

import pytest

from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.sinks.url import find
from tests.refit.engines import model, refill, versions_in
from tests.refit.test_file_channel import Engine, on_disk, pushing


class Interrupted(Engine):
    """Another trainer pushes while it loads the second version."""

    def __init__(self, dst: Path) -> None:
        super().__init__()
        self.dst = dst
        self.other = ""

    def load(self, directory: Path, version: int) -> None:
        if version == 2 and not self.other:
            self.other = "it was let in"
            try:
                with pushing(model(7), self.dst, self) as second:
                    second.push(7, force=True)
            except RefitError as error:
                self.other = str(error)
        super().load(directory, version)


@pytest.mark.parametrize("fails", [False, True])
def test_two_trainers_do_not_take_away_each_others_way_back(dst: Path, fails: bool) -> None:
    source, engine = model(1), Interrupted(dst)
    with pushing(source, dst, engine) as sync:
        sync.push(1)
        engine.fail = {2} if fails else set()
        refill(source, 2)
        if fails:
            with pytest.raises(RefitError, match="does not fit the GPU"):
                sync.push(2)
        else:
            sync.push(2)
    at = 1 if fails else 2
    assert "is being written" in engine.other
    assert versions_in(engine.tensors) == on_disk(dst) == {at} and engine.at == at
    assert os.listdir(dst.parent) == [dst.name]


def test_a_trainer_that_comes_during_a_push_takes_no_file_of_it(dst: Path) -> None:
    source, engine = model(1), Engine()
    with pushing(source, dst, engine) as sync:
        sync.push(1)

        def late() -> None:  # between prepare and commit
            with pushing(model(7), dst, engine) as second, pytest.raises(RefitError, match="being written"):
                second.push(7, force=True)

        sink = sync._links[0].sink
        applier = sink.receiver._applier  # type: ignore[attr-defined]
        prepare = applier.prepare
        applier.prepare = lambda: (prepare(), late())
        engine.fail = {2}
        refill(source, 2)
        with pytest.raises(RefitError, match="does not fit the GPU"):
            sync.push(2)
    assert versions_in(engine.tensors) == on_disk(dst) == {1}


def test_a_directory_by_a_symlink(dst: Path) -> None:
    real = dst.with_name("real")
    source, engine = model(1), Engine()
    with pushing(source, real, engine) as sync:
        sync.push(1)
    dst.symlink_to(real)
    engine.fail = {2}
    refill(source, 2)
    with pushing(source, dst, engine) as sync:
        with pytest.raises(RefitError, match="does not fit the GPU"):
            sync.push(2)
        assert versions_in(engine.tensors) == on_disk(real) == {1}
        assert dst.is_symlink() and sorted(os.listdir(dst.parent)) == sorted([dst.name, "real"])
        sync.push(2)
    assert on_disk(real) == {2} and dst.is_symlink()
    assert sorted(os.listdir(dst.parent)) == sorted([dst.name, "real"])


def test_a_folder_of_the_users_is_not_removed(dst: Path) -> None:
    mine = dst.with_name(f".{dst.name}.before")
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pushing(model(1), dst, Engine()) as sync, pytest.raises(RefitError, match="not written by a push"):
        sync.push(1)
    assert (mine / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("url", ["file:///", "file:///..", "file:////", "file:///?to=torch_dist"])
def test_the_root_is_no_directory_for_a_push(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no directory"):
        find(url, source=tmp_path)
