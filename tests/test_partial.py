"""Who owns a partial directory: what dead writers left goes, what may be alive stays."""

import json
import os
from pathlib import Path

import pytest

from convtools import partial
from convtools.errors import StorageError
from convtools.staging import Staging, join
from tests.publishing import beside, publish, python, tree, whole


def leave(dst: Path, owner: object, token: str = "0123456789abcdef") -> Path:
    """A partial directory as another process would leave it."""
    path = dst.with_name(f".{dst.name}.partial-{token}")
    (path / "data").mkdir(parents=True)
    (path / "data/a.bin").write_text("theirs")
    (path / "owner.json").write_text(owner if isinstance(owner, str) else json.dumps(owner))
    return path


HERE = {"host": os.uname().nodename, "boot": partial._boot()}


@pytest.mark.parametrize(
    "owner",
    [
        {"pid": 1, "host": "elsewhere", "boot": "another", "token": "0123456789abcdef"},
        {"pid": 1},
        {},
        [],
        "",
        "{not json",
        "[" * 4000,
        "\0" * 5000,
    ],
)
def test_what_another_host_left_is_told_and_kept(dst: Path, owner: object) -> None:
    path = leave(dst, owner)
    stage = publish(dst, "new")
    assert stage.left_alone == (path,)
    assert (path / "data/a.bin").read_text() == "theirs" and tree(dst) == whole("new")


@pytest.mark.parametrize(
    "owner", [HERE, HERE | {"boot": "before the reboot"}, HERE | {"host": "a container here"}]
)
def test_what_this_host_left_is_taken_away(dst: Path, owner: object) -> None:
    path = leave(dst, owner)
    assert publish(dst, "new").left_alone == ()
    assert not path.exists()


def test_a_directory_without_an_owner_holds_nothing_and_goes(dst: Path) -> None:
    path = dst.with_name(".out.partial-0123456789abcdef")
    path.mkdir()
    (path / "owner.new").write_text("{")
    assert publish(dst, "new").left_alone == () and not path.exists()


def test_only_our_names_are_touched(dst: Path) -> None:
    others = [
        ".out.partial-xyz",
        ".out.partial-0123456789abcdef0",
        ".out2.partial-0123456789abcdef",
        "out.partial",
    ]
    for name in others:
        path = dst.with_name(name)
        path.mkdir()
        (path / "owner.json").write_text(json.dumps(HERE))
    dst.with_name(".out.partial-aaaaaaaaaaaaaaaa").symlink_to(dst.parent / others[0])
    dst.with_name(".out.partial-bbbbbbbbbbbbbbbb").write_text("a file")
    publish(dst, "new")
    assert len(list(dst.parent.iterdir())) == 7


def test_an_owner_file_that_is_a_link_is_not_followed(dst: Path) -> None:
    path = leave(dst, {})
    (path / "owner.json").unlink()
    (path / "owner.json").symlink_to(dst.parent / "elsewhere.json")
    (dst.parent / "elsewhere.json").write_text(json.dumps(HERE))
    assert publish(dst, "new").left_alone == (path,)


def test_a_directory_moved_aside_comes_back(dst: Path) -> None:
    """A crash between the two renames where names cannot be swapped, then a run that is refused."""
    path = leave(dst, HERE)
    (path / "old").mkdir()
    (path / "old/a.bin").write_text("old")
    with pytest.raises(StorageError, match="exists and is not empty"):
        publish(dst, "new")
    assert tree(dst) == {"a.bin": "old"} and beside(dst) == []


def test_without_locks_the_process_tells(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_take", lambda fd: None)
    mine = HERE | {"pid": os.getpid(), "started": partial._started(os.getpid())}
    leave(dst, mine)
    with pytest.raises(StorageError, match=f"is being written by process {os.getpid()} on"):
        publish(dst, "new")
    leave(dst, mine | {"started": "of another with this pid"}, "1" * 16)
    leave(dst, mine | {"boot": "before the reboot"}, "2" * 16)
    leave(dst, mine | {"pid": 2**22 + 1}, "3" * 16)
    with pytest.raises(StorageError, match="is being written"):
        publish(dst, "new")
    assert beside(dst) == [".out.partial-0123456789abcdef"]


def test_a_forked_child_does_not_remove_its_parents_work(dst: Path) -> None:
    script = """
import os, sys
from convtools.staging import Staging
with Staging(sys.argv[1]) as s:
    with s.open("a") as file:
        file.write(b"new")
    pid = os.fork()
    if not pid:
        raise SystemExit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    s.commit()
"""
    process = python(script, dst)
    assert process.communicate()[1] == "" and process.returncode == 0
    assert tree(dst) == {"a": "new"}


RANK = """
import sys
from convtools.staging import join
with join(sys.argv[1], sys.argv[2]).open(f"shard_{sys.argv[3]}") as file:
    file.write(sys.argv[3].encode())
"""


def test_ranks_write_into_one_directory(dst: Path) -> None:
    with Staging(dst) as stage:
        ranks = [python(RANK, stage.path, stage.token, rank) for rank in (1, 2)]
        assert [(r.communicate()[1], r.returncode) for r in ranks] == [("", 0), ("", 0)]
        mine = join(stage.path, stage.token)
        mine.file("shard_0").write_text("0")
        mine.flush()
        stage.commit(last={"marker": b"3"})
    assert tree(dst) == {"marker": "3", "shard_0": "0", "shard_1": "1", "shard_2": "2"}
    with pytest.raises(StorageError, match="not the output directory of the run to join"):
        join(stage.path, stage.token)


def test_joining_another_run_is_refused(dst: Path) -> None:
    with Staging(dst) as stage:
        with pytest.raises(StorageError, match=f"expected: token {'0' * 16}\n  found: token {stage.token}"):
            join(stage.path, "0" * 16)
        with pytest.raises(StorageError, match="found: no such run"):
            join(dst, stage.token)
