"""Which iteration of a Megatron folder is meant, and what is said where none is."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from convtools.errors import CheckpointError, ConvtoolsError, UnsupportedEncoding, UsageError
from convtools.stores.megatron_dir import TRACKER, IterationDir, find_iteration, is_megatron

DIST = ("metadata.json", ".metadata", "common.pt", "__0_0.distcp")
LEGACY = ("mp_rank_00/model_optim_rng.pt",)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """A reader that waits (a pipe, say) fails instead of hanging."""

    def late(*_: object) -> None:
        raise TimeoutError("took over 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fill(folder: Path, names: tuple[str, ...] = DIST) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def save(root: Path, tracker: str | bytes | None, *folders: str, names: tuple[str, ...] = DIST) -> Path:
    """A save folder with a tracker file and iterations."""
    root.mkdir(exist_ok=True)
    for folder in folders:
        fill(root / folder, names)
    if tracker is not None:
        (root / TRACKER).write_bytes(tracker if isinstance(tracker, bytes) else tracker.encode())
    return root


def refusal(root: Path, wanted: int | str | None = None, kind: type[ConvtoolsError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        find_iteration(root, wanted)
    assert type(caught.value) is kind
    said = str(caught.value)
    assert len(said) < 2000 and all(line.isprintable() for line in said.splitlines())
    return said


@pytest.mark.parametrize("text", ["20", "20\n", " 20 \r\n", "0000020"])
def test_the_tracker_names_a_number(tmp_path: Path, text: str) -> None:
    save(tmp_path, text, "iter_0000010", "iter_0000020", "iter_0000030")
    assert find_iteration(tmp_path) == IterationDir(tmp_path / "iter_0000020", 20, "torch_dist")


@pytest.mark.parametrize("text", ["release", "release\n"])
def test_the_tracker_names_the_release(tmp_path: Path, text: str) -> None:
    save(tmp_path, text, "iter_0000010", "release", names=LEGACY)
    assert find_iteration(tmp_path) == IterationDir(tmp_path / "release", "release", "torch")


def test_latest_is_what_the_tracker_says_not_the_largest_number(tmp_path: Path) -> None:
    save(tmp_path, "9", "iter_0000009", "iter_0000100", "release")
    assert find_iteration(tmp_path).iteration == 9


@pytest.mark.parametrize(
    ("wanted", "folder"), [(10, "iter_0000010"), (20, "iter_0000020"), ("release", "release")]
)
def test_what_is_wanted_goes_before_the_tracker(tmp_path: Path, wanted: int | str, folder: str) -> None:
    save(tmp_path, "20", "iter_0000010", "iter_0000020", "release")
    assert find_iteration(tmp_path, wanted) == IterationDir(tmp_path / folder, wanted, "torch_dist")


@pytest.mark.parametrize("tracker", [b"\0\1\2", b"9" * 5000, None])
def test_what_is_wanted_needs_no_tracker(tmp_path: Path, tracker: bytes | None) -> None:
    save(tmp_path, tracker, "iter_0000010")
    assert find_iteration(tmp_path, 10).path == tmp_path / "iter_0000010"


def test_numbers_of_eight_and_more_digits(tmp_path: Path) -> None:
    save(tmp_path, "12345678", "iter_9999999", "iter_12345678", "iter_123456789012")
    assert find_iteration(tmp_path) == IterationDir(tmp_path / "iter_12345678", 12345678, "torch_dist")
    assert find_iteration(tmp_path, 123456789012).path == tmp_path / "iter_123456789012"
    assert find_iteration(tmp_path / "iter_12345678").iteration == 12345678
    found = refusal(tmp_path, 7)
    assert "found: iter_9999999, iter_12345678, iter_123456789012" in found  # by number, not by name


@pytest.mark.parametrize(
    ("names", "format"),
    [
        (DIST, "torch_dist"),
        (LEGACY, "torch"),
        (("mp_rank_03_001/model_optim_rng.pt",), "torch"),
        (("mp_rank_03_001_015/model_optim_rng.pt", "mp_rank_03_001_015/distrib_optim.pt"), "torch"),
        ((*DIST, "mp_rank_00/train_dataloader_dprank000.pt"), "torch_dist"),
    ],
)
def test_the_format_is_told_by_names(tmp_path: Path, names: tuple[str, ...], format: str) -> None:
    save(tmp_path, "1", "iter_0000001", names=names)
    assert find_iteration(tmp_path).format == format


@pytest.mark.parametrize(
    ("name", "iteration"), [("iter_0000007", 7), ("release", "release"), ("step-7", None), ("iter_7", None)]
)
@pytest.mark.parametrize(("names", "format"), [(DIST, "torch_dist"), (LEGACY, "torch")])
def test_a_folder_that_is_one_iteration(
    tmp_path: Path, name: str, iteration: int | str | None, names: tuple[str, ...], format: str
) -> None:
    root = fill(tmp_path / name, names)
    assert is_megatron(root)
    assert find_iteration(root) == IterationDir(root, iteration, format)
    if iteration is not None:
        assert find_iteration(root, iteration).iteration == iteration


def test_an_iteration_is_known_by_the_folder_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "newest").symlink_to(fill(tmp_path / "iter_0000007"))
    assert find_iteration(tmp_path / "newest").iteration == 7
    monkeypatch.chdir(tmp_path / "iter_0000007")
    assert find_iteration(Path(".")) == IterationDir(Path("."), 7, "torch_dist")


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        ("iter_0000007", 8, "found: 7"),
        ("iter_0000007", "release", "found: 7"),
        ("release", 7, "found: release"),
        ("step-7", 7, "found: its name does not tell which"),
    ],
)
def test_another_iteration_than_the_folder_is_refused(
    tmp_path: Path, name: str, wanted: int | str, found: str
) -> None:
    said = refusal(fill(tmp_path / name), wanted, UsageError)
    assert said.startswith(f"--iteration {wanted}, but this folder is one iteration itself")
    assert found in said


@pytest.mark.parametrize(
    "wanted", [5, 0, -1, 10**40, "release", "iter_0000001", "../other", "latest", "1", ""]
)
def test_an_iteration_that_is_not_there_is_refused(tmp_path: Path, wanted: int | str) -> None:
    fill(tmp_path / "other")
    save(tmp_path / "run", "1", "iter_0000001" if wanted != "iter_0000001" else "iter_0000002")
    said = refusal(tmp_path / "run", wanted)
    assert "there is no `" in said and "found: iter_000000" in said
    assert "pass --iteration N or --iteration release" in said


def test_the_tracker_names_what_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, "30", *(f"iter_{n:07d}" for n in range(1, 21)))
    said = refusal(tmp_path)
    assert "there is no `iter_0000030`" in said
    assert "iter_0000001, iter_0000002" in said and "... and 12 more" in said
    save(tmp_path, "release")
    assert "there is no `release`" in refusal(tmp_path)


def test_a_missing_tracker_is_not_guessed(tmp_path: Path) -> None:
    save(tmp_path, None, "iter_0000010", "release")
    said = refusal(tmp_path)
    assert f"`{TRACKER}` is missing: the save may not have finished" in said
    assert "found: release, iter_0000010" in said
    assert "what to do: pass --iteration N" in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "found: ``"),
        (b"\n\n", "found: ``"),
        (b"latest", "found: `latest`"),
        (b"iter_0000001", "found: `iter_0000001`"),
        (b"-1", "found: `-1`"),
        (b"+1", "found: `+1`"),
        (b"1.0", "found: `1.0`"),
        (b"1e1", "found: `1e1`"),
        (b"1_0", "found: `1_0`"),
        (b"1 2", "found: `1 2`"),
        (b"Release", "found: `Release`"),
        (b"../iter_0000001", "found: `../iter_0000001`"),
        (b"1\0", "found: `1\\x00`"),
        (b"\x1b[2J\x07", "found: `\\x1b[2J\\x07`"),
        (b"\xff\xfe1\x00", "found: `\\ufffd\\ufffd1\\x00`"),
        ("\u0661".encode(), "found: `\ufffd\ufffd`"),
        (b"9" * 100, f"found: `{'9' * 40}`"),
    ],
)
def test_a_tracker_that_names_nothing(tmp_path: Path, text: bytes, found: str) -> None:
    save(tmp_path, text, "iter_0000001", "release")
    said = refusal(tmp_path)
    assert "the tracker file does not name an iteration" in said
    assert "expected: a number, or `release`" in said
    assert found in said.splitlines()[-1]


@pytest.mark.parametrize("nbytes", [101, 10**12])
def test_a_huge_tracker_is_not_read(tmp_path: Path, nbytes: int) -> None:
    save(tmp_path, b"1", "iter_0000001")
    os.truncate(tmp_path / TRACKER, nbytes)
    said = refusal(tmp_path)
    assert "the tracker file is too large" in said and f"found: {nbytes}" in said


def test_a_tracker_that_is_no_file(tmp_path: Path) -> None:
    save(tmp_path, None, "iter_0000001")
    tracker = tmp_path / TRACKER
    os.mkfifo(tracker)
    assert "found: a pipe, socket or device" in refusal(tmp_path)
    tracker.unlink()
    tracker.mkdir()
    assert "found: a folder" in refusal(tmp_path)
    tracker.rmdir()
    tracker.symlink_to("gone")
    assert "No such file" in refusal(tmp_path)
    tracker.unlink()
    tracker.symlink_to(TRACKER)
    assert "cannot open" in refusal(tmp_path)
    tracker.unlink()
    tracker.symlink_to("/dev/zero")
    assert "found: a pipe, socket or device" in refusal(tmp_path)


def test_a_tracker_may_be_a_link(tmp_path: Path) -> None:
    save(tmp_path, None, "iter_0000001")
    (tmp_path / "real.txt").write_text("1")
    (tmp_path / TRACKER).symlink_to("real.txt")
    assert find_iteration(tmp_path).iteration == 1


def test_what_is_no_checkpoint_at_all(tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert "this is no checkpoint that convtools knows" in said and "found: an empty folder" in said
    for i in range(20):
        (tmp_path / f"{i:02d}").write_bytes(b"")
    said = refusal(tmp_path)
    assert "found: `00`, `01`" in said and "... and 12 more" in said
    assert "No such file" in refusal(tmp_path / "nowhere")
    assert "Not a directory" in refusal(tmp_path / "00")


def test_names_that_would_redraw_the_terminal_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\nb").write_bytes(b"")
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    said = refusal(tmp_path)
    assert "`a\\x1b[2J\\nb`" in said and "`\\udcff`" in said
    said.encode()  # a lone surrogate could not be printed


def test_an_iteration_that_holds_nothing(tmp_path: Path) -> None:
    save(tmp_path, "1")
    (tmp_path / "iter_0000001").mkdir()
    said = refusal(tmp_path)
    assert "this iteration holds no checkpoint" in said and "found: an empty folder" in said
    assert f"where: {tmp_path / 'iter_0000001'}" in said
    (tmp_path / "iter_0000001" / "x\x07").mkdir()
    assert "found: `x\\x07`" in refusal(tmp_path)


def test_an_iteration_that_is_no_folder(tmp_path: Path) -> None:
    save(tmp_path, "1")
    (tmp_path / "iter_0000001").write_bytes(b"")
    assert "Not a directory" in refusal(tmp_path)
    (tmp_path / "iter_0000001").unlink()
    (tmp_path / "iter_0000001").symlink_to("gone")
    assert "No such file" in refusal(tmp_path)


def test_a_plain_dcp_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "1", "iter_0000001", names=(".metadata", "__0_0.distcp"))
    for root in (tmp_path, tmp_path / "iter_0000001"):
        said = refusal(root, kind=UnsupportedEncoding)
        assert "plain DCP checkpoint (torch_dcp or fsdp_dtensor), not torch_dist" in said
        assert "found: .metadata without metadata.json" in said
        assert f"where: {tmp_path / 'iter_0000001'}" in said


def test_an_unfinished_torch_dist_save_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "1", "iter_0000001", names=("metadata.json", "common.pt", "__0_0.distcp"))
    said = refusal(tmp_path)
    assert "`.metadata` is missing" in said and "the save did not finish" in said


@pytest.mark.parametrize(
    "name",
    [
        "iter_1",
        "iter_000001",
        "iter_-000001",
        "iter_00000x1",
        "iter_0000001.tmp",
        "iter_0000001\n",
        "xiter_0000001",
        "iter_\u0660\u0660\u0660\u0660\u0660\u0660\u0661",
    ],
)
def test_names_that_only_look_like_iterations(tmp_path: Path, name: str) -> None:
    save(tmp_path, None, name)
    assert "this is no checkpoint that convtools knows" in refusal(tmp_path)
    assert not is_megatron(tmp_path)
    assert find_iteration(tmp_path / name).iteration is None


@pytest.mark.parametrize(
    "name", ["mp_rank_0", "mp_rank_00_00", "mp_rank_00_000_000_000", "mp_rank_\u0660\u0660"]
)
def test_names_that_only_look_like_ranks(tmp_path: Path, name: str) -> None:
    save(tmp_path, "1", "iter_0000001", names=(f"{name}/model_optim_rng.pt",))
    assert "this iteration holds no checkpoint" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", [TRACKER, "iter_0000001", "release", "mp_rank_00", "mp_rank_00_000", "metadata.json", ".metadata"]
)
def test_is_megatron_goes_by_names(tmp_path: Path, name: str) -> None:
    assert not is_megatron(tmp_path)
    (tmp_path / "config.json").write_bytes(b"")
    assert not is_megatron(tmp_path)
    (tmp_path / name).write_bytes(b"")
    assert is_megatron(tmp_path)
    assert not is_megatron(tmp_path / name)
    assert not is_megatron(tmp_path / "nowhere")
