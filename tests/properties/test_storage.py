"""Folders that runs are kept in: whatever happens to them, they hold what was written or are refused by name."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.storage import store as storage
from structured_voronoi.storage.store import LOCK, MANIFEST, LineFile, Store, read_manifest

SETTINGS = {"seed": 0, "sampler": {"name": "SVS", "scale": 0.5}, "limit": float("nan"), "prompt": "at the café"}


def kept_run(folder: Path) -> Path:
    """A run of two parts, one of them in a folder of its own."""
    with Store(folder) as store:
        store.begin("test", SETTINGS, {"torch": "2"})
        store.commit(
            {"draws-0.json": b"[1, 2, 3]" * 9, "guide/weights": bytes(range(256))}, progress={"done": 1, "of": 2}
        )
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    with Store(kept_run(tmp_path)) as store:
        store.begin("test", SETTINGS, {"torch": "3"})
        assert store.names("draws") == ["draws-0.json"]
        assert store.read("guide/weights") == bytes(range(256))
        store.commit({"draws-1.json": b"{}"}, drop=["draws-0.json"], finished=True)
    assert set(files_of(tmp_path)) == {LOCK, MANIFEST, "draws-1.json", "guide/weights"}
    manifest = read_manifest(tmp_path)
    assert manifest.finished
    assert manifest.progress == {"done": 1, "of": 2}
    assert manifest.versions == {"torch": "2"}
    assert manifest.damage(tmp_path) == []


def test_every_flipped_byte_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    whole = files_of(kept_run(tmp_path))
    places = [(name, i) for name, data in whole.items() for i in range(len(data)) if name != LOCK]
    source = random.Random(5)
    assert len(places) > 800
    for name, place in source.sample(places, 500):
        damaged = bytearray(whole[name])
        damaged[place] ^= source.randrange(1, 256)
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(SamplingError, match=name.replace(".", r"\.")):
            Store(tmp_path)
        (tmp_path / name).write_bytes(whole[name])
    Store(tmp_path).close()


@pytest.mark.parametrize("harm", ["missing", "cut", "longer", "folder", "pipe"])
@pytest.mark.parametrize("name", ["draws-0.json", "guide/weights"])
def test_a_part_that_is_no_longer_what_it_was_is_refused(tmp_path: Path, name: str, harm: str) -> None:
    path = kept_run(tmp_path) / name
    data = path.read_bytes()
    path.unlink()
    if harm in ("cut", "longer"):
        path.write_bytes(data[:-1] if harm == "cut" else data + b" ")
    elif harm == "folder":
        path.mkdir()
    elif harm == "pipe":
        os.mkfifo(path)
    with pytest.raises(SamplingError, match=f"{name} is (missing|damaged)"):
        Store(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', "[" * 100_000, "\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (kept_run(tmp_path) / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(SamplingError, match=f"{MANIFEST} is damaged"):
        Store(tmp_path)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        store.begin("test", {}, {})
        store.manifest = storage.replace(store.run, parts={"../outside": storage.Part("0", 1)})
        (tmp_path / "run" / MANIFEST).write_bytes(store.run.encode())
    with pytest.raises(SamplingError, match=r"names '\.\./outside', which is no part's name"):
        Store(tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("test", {"seed": 1}, r"another seed \(0, not 1\)"),
        ("test", {"sampler": {"name": "SVS", "scale": 0.25}}, r"another sampler scale \(0.5, not 0.25\)"),
        ("test", {"prompt": "x" * 99}, r'another prompt \("at the café", not "x{59}…\)'),
        ("test", {"more": True}, r"another more \(null, not true\)"),
        ("other", {}, "holds a run of test, not of other"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, kind: str, changed: dict[str, Any], said: str) -> None:
    with Store(kept_run(tmp_path)) as store, pytest.raises(SamplingError, match=said):
        store.begin(kind, {**SETTINGS, **changed}, {})


def test_a_folder_with_a_run_needs_resume_and_one_of_somebody_else_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "new" / "folder", resume=False).close()
    Store(tmp_path / "new" / "folder", resume=False).close()  # nothing was begun in it
    with pytest.raises(SamplingError, match="holds a run already; add --resume or choose another folder"):
        Store(kept_run(tmp_path / "run"), resume=False)
    (tmp_path / "own").mkdir()
    for name in ("draft.new", "letter.txt", LOCK):
        (tmp_path / "own" / name).write_text("dear")
    with pytest.raises(SamplingError, match=r"holds other files \(draft.new\)"):
        Store(tmp_path / "own")
    assert files_of(tmp_path / "own") == dict.fromkeys(("draft.new", "letter.txt", LOCK), b"dear")
    with pytest.raises(SamplingError, match=r"letter.txt cannot be written \(it is a file\); choose another"):
        Store(tmp_path / "own" / "letter.txt")
    with pytest.raises(SamplingError, match=r"cannot be written \(Not a directory\)"):
        Store(tmp_path / "own" / "letter.txt" / "run")


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    script = "from structured_voronoi.storage.store import Store; store = Store('.'); print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SamplingError, match=f"is in use by process {other.pid}; wait until it has ended"):
            Store(tmp_path)
    finally:
        other.kill()
        other.communicate()
    Store(tmp_path).close()  # the lock of a killed process is free
    assert (tmp_path / LOCK).read_bytes().strip() == b""


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("symbolic link", "is a symbolic link"),
        ("dangling link", "is a symbolic link"),
        ("hard link", "has more than one hard link"),
        ("pipe", "is not a regular file"),
        ("other file", "holds data that no run has written"),
    ],
)
def test_a_lock_file_that_is_a_link_or_holds_other_data_is_refused_and_left_alone(
    tmp_path: Path, kind: str, cause: str, resume: bool
) -> None:
    folder, target = tmp_path / "run", tmp_path / "letter.txt"
    if resume:
        kept_run(folder)
        (folder / LOCK).unlink()
    else:
        folder.mkdir()
    lock = folder / LOCK
    target.write_text("dear")
    if kind == "symbolic link":
        lock.symlink_to(target)
    elif kind == "dangling link":
        lock.symlink_to(tmp_path / "new.txt")
    elif kind == "hard link":
        lock.hardlink_to(target)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.write_text("dear")
    with pytest.raises(SamplingError, match=f"^the lock {lock} {cause} and is not used; remove it, or choose [^\n]*$"):
        Store(folder, resume)
    assert target.read_text() == "dear"
    assert kind != "other file" or lock.read_text() == "dear"
    assert not (tmp_path / "new.txt").exists()


def test_a_lock_file_of_a_killed_process_is_used_again(tmp_path: Path) -> None:
    (kept_run(tmp_path) / LOCK).write_bytes(b"123456789")
    with Store(tmp_path):
        assert int((tmp_path / LOCK).read_bytes()) == os.getpid()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_link_in_place_of_a_file_being_written_is_not_followed(tmp_path: Path, link: Any) -> None:
    other, path = tmp_path / "letter.txt", tmp_path / "lines.jsonl"
    other.write_text("dear")
    link(tmp_path / "lines.jsonl.new", other)
    with LineFile(path) as lines:
        lines.write(["one"])
    with Store(tmp_path / "run") as store:
        store.begin("test", SETTINGS, {})
        link(tmp_path / "run" / "draws-0.json.new", other)
        store.commit({"draws-0.json": b"[1]"})
    assert other.read_text() == "dear"
    assert path.read_text() == "one\n"
    assert not path.is_symlink()
    assert read_manifest(tmp_path / "run").damage(tmp_path / "run") == []
    assert not list(tmp_path.rglob("*.new"))


@pytest.mark.parametrize("name", ["guide", "ray"])
def test_a_run_does_not_write_through_a_link_to_another_folder(tmp_path: Path, name: str) -> None:
    kept_run(tmp_path / "run")
    (tmp_path / "run" / "ray" / "session").mkdir(parents=True)
    (tmp_path / "run" / "ray" / "session_latest").symlink_to("session")  # as Ray does
    Store(tmp_path / "run").close()
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SamplingError, match=f"{name} is a link to a folder, and checkpoints do not follow links; repl"):
        Store(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("failing", ["draws-1.json", "draws-2.json", MANIFEST])
def test_a_write_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, code: int
) -> None:
    before = files_of(kept_run(tmp_path))

    def sync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(f"{failing}.new"):
            raise OSError(code, os.strerror(code))

    with Store(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(SamplingError, match=f"{failing} cannot be written .{os.strerror(code)}.") as raised:
            store.commit({"draws-1.json": b"1", "draws-2.json": b"2"}, drop=["draws-0.json"])
        assert ("make room and resume" in str(raised.value)) == (code == errno.ENOSPC)
    assert files_of(tmp_path) == before
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, opened = files_of(kept_run(tmp_path)), os.open

    def read_only(path: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(SamplingError, match=r"cannot be written \(Read-only file system\); choose another folder"):
        Store(tmp_path)
    assert files_of(tmp_path) == before
    assert read_manifest(tmp_path).damage(tmp_path) == []  # to look at it is no trouble


def test_parts_that_a_killed_run_left_unlisted_are_overwritten(tmp_path: Path) -> None:
    kept_run(tmp_path)
    (tmp_path / "draws-1.json").write_bytes(b"half")
    (tmp_path / "manifest.json.new").write_bytes(b"half")
    with Store(tmp_path) as store:
        assert store.names("draws") == ["draws-0.json"]
        store.commit({"draws-1.json": b"whole"})
    assert (tmp_path / "draws-1.json").read_bytes() == b"whole"
    assert not (tmp_path / "manifest.json.new").exists()


def test_a_folder_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no run begins, and what was made for it is removed: not what has the same name elsewhere."""
    (tmp_path / "other" / "run").mkdir(parents=True)
    for begins in (False, True):
        monkeypatch.chdir(tmp_path)
        with Store("new/run" if begins else "run") as store:
            monkeypatch.chdir(tmp_path / "other")
            if begins:
                store.begin("test", SETTINGS, {})
    assert (tmp_path / "new" / "run" / MANIFEST).is_file()
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "other" / "run").is_dir()
