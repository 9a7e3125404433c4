"""A directory is published whole or not at all, and only where that makes sense."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from convtools import staging
from convtools.errors import StorageError
from convtools.staging import Staging
from tests.publishing import anything, beside, fill, publish, tree, whole


def test_a_new_directory_is_published_whole(dst: Path) -> None:
    with Staging(dst) as stage:
        fill(stage, "new")
        assert not dst.exists()
        stage.commit(last={"done": b"new"})
        assert tree(dst) == whole("new")
    assert beside(dst) == [] and stage.left_alone == ()


def test_an_empty_directory_is_filled(dst: Path) -> None:
    dst.mkdir()
    publish(dst, "new")
    assert tree(dst) == whole("new")


def test_the_published_directory_has_the_users_mode(dst: Path) -> None:
    (dst.parent / "plain").mkdir()
    publish(dst, "new")
    assert dst.stat().st_mode == (dst.parent / "plain").stat().st_mode


@pytest.mark.parametrize("swap", [True, False])
def test_overwrite_replaces_the_whole(dst: Path, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not swap:
        monkeypatch.setattr(staging, "exchange", lambda a, b: False)
    publish(dst, "old")
    (dst / "extra").write_text("of the old only")
    publish(dst, "new", overwrite=True, replaceable=anything)
    assert tree(dst) == whole("new") and beside(dst) == []


def test_without_a_swap_a_failed_rename_puts_the_old_one_back(
    dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(dst, "old")

    def gone(a: Path, b: Path) -> bool:
        os.rename(a, a.with_name("lost"))
        return False

    monkeypatch.setattr(staging, "exchange", gone)
    with (
        pytest.raises(StorageError, match="No such file"),
        Staging(dst, overwrite=True, replaceable=anything) as s,
    ):
        s.commit()
    assert tree(dst) == whole("old")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_dst_as_it_was(dst: Path, error: type[BaseException]) -> None:
    publish(dst, "old")
    with pytest.raises(error), Staging(dst, overwrite=True, replaceable=anything) as stage:
        fill(stage, "new")
        raise error
    assert tree(dst) == whole("old") and beside(dst) == []


def test_leaving_without_a_commit_publishes_nothing(dst: Path) -> None:
    with Staging(dst) as stage:
        fill(stage, "new")
    assert not dst.exists() and beside(dst) == []


def test_a_filled_directory_is_not_replaced_unasked(dst: Path) -> None:
    publish(dst, "old")
    with pytest.raises(StorageError, match=r"exists and is not empty\n  found: a.bin, c.bin, deep, done"):
        publish(dst, "new")
    assert tree(dst) == whole("old") and beside(dst) == []


def test_the_caller_says_what_may_be_replaced(dst: Path) -> None:
    publish(dst, "old")
    with pytest.raises(StorageError, match="is not replaced: it holds no checkpoint"):
        publish(dst, "new", overwrite=True, replaceable=lambda path: "it holds no checkpoint")
    with pytest.raises(TypeError, match="overwrite needs replaceable"):
        Staging(dst, overwrite=True)
    assert tree(dst) == whole("old")


def test_the_home_directory_is_never_replaced(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(dst, "old")
    monkeypatch.setenv("HOME", str(dst / "deep"))
    with pytest.raises(StorageError, match="the home directory lies in it"):
        publish(dst, "new", overwrite=True, replaceable=anything)


def test_the_working_directory_is_never_replaced(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst.mkdir()
    monkeypatch.chdir(dst)
    with pytest.raises(StorageError, match="the working directory lies in"):
        Staging(Path())


def test_a_directory_that_another_fills_meanwhile_is_kept(dst: Path) -> None:
    with pytest.raises(StorageError, match="was made or replaced by another process"), Staging(dst) as stage:
        fill(stage, "new")
        dst.mkdir()
        (dst / "theirs").write_text("theirs")
        stage.commit()
    assert tree(dst) == {"theirs": "theirs"} and beside(dst) == []


def test_an_empty_directory_that_another_fills_meanwhile_is_kept(dst: Path) -> None:
    dst.mkdir()
    with pytest.raises(StorageError, match="is not empty"), Staging(dst) as stage:
        (dst / "theirs").write_text("theirs")
        stage.commit()
    assert tree(dst) == {"theirs": "theirs"}


def _file(d: Path) -> dict[str, object]:
    (d / "out").write_text("a file")
    return {}


def _dangling(d: Path) -> dict[str, object]:
    (d / "out").symlink_to(d / "nowhere")
    return {}


def _circular(d: Path) -> dict[str, object]:
    (d / "out").symlink_to(d / "out")
    return {}


def _source_itself(d: Path) -> dict[str, object]:
    (d / "src").mkdir()
    (d / "out").symlink_to(d / "src")
    return {"src": [d / "src"]}


def _source_below(d: Path) -> dict[str, object]:
    (d / "out/src").mkdir(parents=True)
    return {"src": [d / "out/src"]}


def _source_above(d: Path) -> dict[str, object]:
    (d / "link").symlink_to(d)
    return {"src": [d / "link"]}


def _source_file_below(d: Path) -> dict[str, object]:
    (d / "out").mkdir()
    (d / "out/model.safetensors").write_text("")
    return {"src": [d / "out/model.safetensors"]}


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (_file, "`.*/out` is not a directory"),
        (_dangling, "is a symlink to nothing\n  found: .*/nowhere"),
        (_circular, "is a symlink to nothing"),
        (_source_itself, "is the source itself"),
        (_source_below, "the source `.*/out/src` lies inside"),
        (_source_file_below, "the source `.*/out/model.safetensors` lies inside"),
        (_source_above, "lies inside the source `.*/link`"),
    ],
)
def test_impossible_places_are_refused_before_anything_is_made(
    tmp_path: Path, arrange: Callable[[Path], dict[str, object]], message: str
) -> None:
    options = arrange(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=message):
        Staging(tmp_path / "out", overwrite=True, replaceable=anything, **options)  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("missing/out", "`.*/missing` is not a directory\n  what to do: mkdir -p"),
        ("file/out", "`.*/file` is not a directory"),
        ("n" * 300, "File name too long"),
        ("/", "is a mount point"),
    ],
)
def test_a_parent_that_cannot_take_it(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=message):
        Staging(tmp_path / place)


def test_a_name_that_leaves_no_room_for_the_partial_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File name too long"), Staging(tmp_path / ("n" * 250)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_sources_beside_are_fine(dst: Path) -> None:
    (dst.parent / "out2").mkdir()
    publish(dst, "new", src=[dst.parent / "out2", dst.parent / "absent"])
    assert tree(dst) == whole("new")


def test_a_symlink_to_a_directory_is_followed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    publish(tmp_path / "disk/real", "old")
    (tmp_path / "out").symlink_to("disk/real")
    publish(tmp_path / "out", "new", overwrite=True, replaceable=anything)
    assert (tmp_path / "out").is_symlink() and tree(tmp_path / "disk/real") == whole("new")
    assert beside(tmp_path / "out") == beside(tmp_path / "disk/real") == []


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "", "."])
def test_no_file_lies_outside(dst: Path, name: str) -> None:
    with Staging(dst) as stage, pytest.raises(StorageError, match="does not name a file inside"):
        stage.file(name)


def test_a_file_is_written_once(dst: Path) -> None:
    with Staging(dst) as stage:
        fill(stage, "new")
        with (
            pytest.raises(StorageError, match=r"could not write `.*a.bin`: File exists"),
            stage.open("a.bin"),
        ):
            pass


def test_errors_of_what_is_read_pass_unchanged(dst: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/absent"), Staging(dst) as stage, stage.open("a"):
        Path("/absent").read_bytes()


def synced(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths brought to disk, in order."""
    order: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    run()
    return order


@pytest.mark.parametrize("given", [True, False])
def test_everything_is_on_disk_before_the_marker_and_the_marker_before_the_rename(
    dst: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, data = "latest_checkpointed_iteration.txt", Path()

    def run() -> None:
        nonlocal data
        with Staging(dst) as stage:
            data = stage.path
            if not given:
                stage.file(marker).write_text("1")
            fill(stage, "new")
            stage.commit(last={marker: b"1"} if given else (marker,))

    order = synced(run, monkeypatch)
    assert order[0].endswith("/owner.new")
    assert order[-3:] == [str(data / marker), str(data), str(dst.parent)]
    assert Counter(order[1:-3]) == Counter(
        str(data / name) for name in ("a.bin", "c.bin", "deep/er/b.bin", "deep/er", "deep", "")
    )
    assert order.index(str(data / "deep/er/b.bin")) < order.index(str(data / "deep/er"))
    assert (dst / marker).read_text() == "1"


def test_nothing_is_synced_on_request(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert synced(lambda: publish(dst, "new", fsync=False), monkeypatch) == []
    assert tree(dst) == whole("new")


def test_a_marker_that_was_not_written_stops_the_commit(dst: Path) -> None:
    with (
        pytest.raises(StorageError, match="`marker`, to be published last, was not written"),
        Staging(dst) as stage,
    ):
        stage.commit(last=("marker",))
    assert not dst.exists()
