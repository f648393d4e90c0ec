"""Checkpoint folders hold what was written, or are refused with the name of the damaged file."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.storage.files import LineFile
from structured_voronoi.storage.locks import LOCK
from structured_voronoi.storage.manifest import MANIFEST, DamagedError, Part, read_manifest
from structured_voronoi.storage.store import Store

SETTINGS = {"seed": 0, "sampler": {"name": "SVS", "scale": 0.5}, "limit": float("nan"), "prompt": "at the café"}


def saved_run(folder: Path) -> Path:
    """A run with two files, one of them in a folder of its own."""
    with Store(folder) as store:
        store.begin("test", SETTINGS, {"torch": "2"})
        store.commit(
            {"draws-0.json": b"[1, 2, 3]" * 9, "guide/weights": bytes(range(256))}, progress={"done": 1, "of": 2}
        )
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_written_files_are_read_again(tmp_path: Path) -> None:
    with Store(saved_run(tmp_path)) as store:
        store.begin("test", SETTINGS, {"torch": "3"})
        assert store.names("draws") == ["draws-0.json"]
        assert store.read("guide/weights") == bytes(range(256))
        store.commit({"draws-1.json": b"{}"}, drop=["draws-0.json"], finished=True)
    assert set(files_of(tmp_path)) == {LOCK, MANIFEST, "draws-1.json", "guide/weights"}
    manifest = read_manifest(tmp_path)
    assert manifest.finished
    assert manifest.progress == {"done": 1, "of": 2}
    assert manifest.versions == {"torch": "2"}
    assert manifest.find_damage(tmp_path) == []


def test_every_flipped_byte_is_refused_with_the_name_of_its_file(tmp_path: Path) -> None:
    whole = files_of(saved_run(tmp_path))
    places = [(name, i) for name, data in whole.items() for i in range(len(data)) if name != LOCK]
    source = random.Random(5)
    assert len(places) > 800
    for name, place in source.sample(places, 500):
        damaged = bytearray(whole[name])
        damaged[place] ^= source.randrange(1, 256)
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(SamplingError) as caught:
            Store(tmp_path)
        assert name in caught.value.message
        (tmp_path / name).write_bytes(whole[name])
    Store(tmp_path).close()


@pytest.mark.parametrize("harm", ["missing", "cut", "longer", "folder", "pipe"])
@pytest.mark.parametrize("name", ["draws-0.json", "guide/weights"])
def test_changed_file_is_refused(tmp_path: Path, name: str, harm: str) -> None:
    path = saved_run(tmp_path) / name
    data = path.read_bytes()
    path.unlink()
    if harm in ("cut", "longer"):
        path.write_bytes(data[:-1] if harm == "cut" else data + b" ")
    elif harm == "folder":
        path.mkdir()
    elif harm == "pipe":
        os.mkfifo(path)
    with pytest.raises(DamagedError, match=f"{name} is (missing|damaged)"):
        Store(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', "[" * 100_000, "\xff"])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (saved_run(tmp_path) / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(DamagedError, match=f"{MANIFEST} is damaged"):
        Store(tmp_path)


def test_manifest_with_a_path_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        store.begin("test", {}, {})
        store.manifest = replace(store.run, parts={"../outside": Part("0", 1)})
        (tmp_path / "run" / MANIFEST).write_bytes(store.run.encode())
    with pytest.raises(SamplingError, match=r"'\.\./outside' is not a valid file name"):
        Store(tmp_path / "run")


def test_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    path = saved_run(tmp_path) / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9'))
    with pytest.raises(SamplingError) as caught:
        Store(tmp_path)
    assert not isinstance(caught.value, DamagedError)
    assert "has format 9" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("test", {"seed": 1}, "a run with seed = 0, not 1"),
        ("test", {"sampler": {"name": "SVS", "scale": 0.25}}, "a run with sampler scale = 0.5, not 0.25"),
        ("test", {"prompt": "x" * 99}, f'a run with prompt = "at the café", not "{"x" * 59}…'),
        ("test", {"more": True}, "a run with more = null, not true"),
        ("other", {}, "holds a run of test, not of other"),
    ],
)
def test_run_with_other_settings_is_refused(tmp_path: Path, kind: str, changed: dict[str, Any], message: str) -> None:
    with Store(saved_run(tmp_path)) as store, pytest.raises(SamplingError) as caught:
        store.begin(kind, {**SETTINGS, **changed}, {})
    assert message in caught.value.message


def test_folder_with_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    Store(tmp_path / "new" / "folder", resume=False).close()
    Store(tmp_path / "new" / "folder", resume=False).close()  # no run was begun in it
    with pytest.raises(SamplingError, match="holds a run; resume it, or choose another folder"):
        Store(saved_run(tmp_path / "run"), resume=False)


def test_folder_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    for name in ("draft.new", "letter.txt", LOCK):
        (tmp_path / name).write_text("dear")
    with pytest.raises(SamplingError, match=r"holds other files \(draft.new\)"):
        Store(tmp_path)
    assert files_of(tmp_path) == dict.fromkeys(("draft.new", "letter.txt", LOCK), b"dear")
    for path, cause in (("letter.txt", "it is a file"), ("letter.txt/run", "Not a directory")):
        with pytest.raises(SamplingError) as caught:
            Store(tmp_path / path)
        assert caught.value.cause == cause


def test_folder_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    script = "from structured_voronoi.storage.store import Store; store = Store('.'); print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SamplingError, match=f"is in use by process {other.pid}"):
            Store(tmp_path)
    finally:
        other.kill()
        other.communicate()
    Store(tmp_path).close()  # the kernel has released the lock of the killed process
    assert (tmp_path / LOCK).read_bytes().strip() == b""


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("symbolic link", "is a symbolic link"),
        ("dangling link", "is a symbolic link"),
        ("hard link", "has more than one hard link"),
        ("pipe", "is not a regular file"),
        ("other file", "holds other data"),
    ],
)
def test_lock_file_that_is_a_link_or_holds_other_data_is_refused_and_unchanged(
    tmp_path: Path, kind: str, cause: str, resume: bool
) -> None:
    folder, target = tmp_path / "run", tmp_path / "letter.txt"
    if resume:
        saved_run(folder)
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
    with pytest.raises(SamplingError) as caught:
        Store(folder, resume)
    assert caught.value.message == f"the lock file {lock} {cause}"
    assert target.read_text() == "dear"
    assert kind != "other file" or lock.read_text() == "dear"
    assert not (tmp_path / "new.txt").exists()


def test_lock_file_of_a_killed_process_is_used_again(tmp_path: Path) -> None:
    (saved_run(tmp_path) / LOCK).write_bytes(b"123456789")
    with Store(tmp_path):
        assert int((tmp_path / LOCK).read_bytes()) == os.getpid()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_link_in_place_of_a_new_file_is_not_followed(tmp_path: Path, link: Any) -> None:
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
    assert read_manifest(tmp_path / "run").find_damage(tmp_path / "run") == []
    assert not list(tmp_path.rglob("*.new"))


@pytest.mark.parametrize("name", ["guide", "ray"])
def test_run_does_not_write_through_a_link_to_another_folder(tmp_path: Path, name: str) -> None:
    saved_run(tmp_path / "run")
    (tmp_path / "run" / "ray" / "session").mkdir(parents=True)
    (tmp_path / "run" / "ray" / "session_latest").symlink_to("session")  # as Ray does
    Store(tmp_path / "run").close()
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SamplingError, match=f"{name} is a link to a folder"):
        Store(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("failing", ["draws-1.json", "draws-2.json", MANIFEST])
def test_failed_write_leaves_the_folder_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, code: int
) -> None:
    before = files_of(saved_run(tmp_path))

    def sync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(f"{failing}.new"):
            raise OSError(code, os.strerror(code))

    with Store(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(SamplingError, match=f"{failing} cannot be written") as caught:
            store.commit({"draws-1.json": b"1", "draws-2.json": b"2"}, drop=["draws-0.json"])
        assert caught.value.cause == os.strerror(code)
        assert ("free some space" in caught.value.remedy) == (code == errno.ENOSPC)
    assert files_of(tmp_path) == before
    Store(tmp_path).close()


def test_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, opened = files_of(saved_run(tmp_path)), os.open

    def read_only(path: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(SamplingError) as caught:
        Store(tmp_path)
    assert caught.value.cause == "Read-only file system"
    assert files_of(tmp_path) == before
    assert read_manifest(tmp_path).find_damage(tmp_path) == []  # it can be read


def test_files_that_are_not_in_the_manifest_are_overwritten(tmp_path: Path) -> None:
    saved_run(tmp_path)
    (tmp_path / "draws-1.json").write_bytes(b"half")
    (tmp_path / "manifest.json.new").write_bytes(b"half")
    with Store(tmp_path) as store:
        assert store.names("draws") == ["draws-0.json"]
        store.commit({"draws-1.json": b"whole"})
    assert (tmp_path / "draws-1.json").read_bytes() == b"whole"
    assert not (tmp_path / "manifest.json.new").exists()


def test_folder_does_not_depend_on_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was created for a run that did not begin is removed, and no other one of that name."""
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


def test_lines_are_complete_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("old\n")
    path.chmod(0o600)
    with LineFile(path) as lines:
        assert path.read_text() == "old\n"
        lines.write(["one", "two"])
        assert path.read_text() == "one\ntwo\n"
        lines.write(["three"])
        assert path.read_text() == "one\ntwo\nthree\n"
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: write(file, data[:2]))  # the disk is full
            with pytest.raises(SamplingError) as caught:
                lines.write(["four"])
        assert caught.value.cause == "No space left on device"
        assert path.read_text() == "one\ntwo\nthree\n"
    assert path.stat().st_mode & 0o777 == 0o600
    with LineFile(Path("/dev/full")) as full, pytest.raises(SamplingError, match="/dev/full cannot be written"):
        full.write(["one"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with LineFile(path) as lines, pytest.raises(SamplingError):
            lines.write(["new"])
    assert path.read_text() == "one\ntwo\nthree\n"
    assert os.listdir(tmp_path) == ["lines"]
