"""Folders that runs are kept in: parts written whole or not at all, a manifest that knows their checksums, a lock.

A part is written under another name, brought to the disk and renamed; then the manifest, which lists the parts, is
replaced in the same way. So a run that is killed at any moment leaves what its last manifest says. Parts that are not
listed are of no account and are overwritten. One process at a time holds the lock and writes the manifest; others may
write files of their own beside it, or keep a folder of their own within.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import is_folder

FORMAT = 1
MANIFEST, LOCK, NEW = "manifest.json", "run.lock", ".new"
RAY = "ray"
"""The folder in which a Ray cluster of the run has its files meanwhile."""
PART_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
SHOWN = 60
"""Characters of a value that an error shows."""
LOCK_BYTES = 20
"""Size of the process id in a lock file, which is padded with spaces."""


class DamagedError(SamplingError):
    """A file of a run is not what was written."""


@dataclass(frozen=True)
class Part:
    """What a part's file must be."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """What a folder holds."""

    kind: str
    """Which command or function the run belongs to."""
    settings: dict[str, Any]
    """Everything the result depends on; a run is resumed with the same only."""
    versions: dict[str, str]
    begun: str
    written: str
    progress: dict[str, Any] = field(default_factory=dict)
    """How far the run has come, for people: {"done": 3, "of": 8, "unit": "texts"}."""
    finished: bool = False
    parts: dict[str, Part] = field(default_factory=dict)

    def encode(self) -> bytes:
        """JSON with a checksum of the rest at its end."""
        body = {"format": FORMAT, **asdict(self)}
        return _as_json({**body, "checksum": hashlib.sha256(_as_json(body)).hexdigest()})

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """The manifest, if its bytes are exactly those that were written."""
        try:
            body = json.loads(data)
            written_as = body.pop("format")
            body.pop("checksum")
            body["parts"] = {name: Part(**part) for name, part in body["parts"].items()}
            manifest = cls(**body)
            is_whole = written_as != FORMAT or manifest.encode() == data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise DamagedError(f"{path} is damaged: its checksum does not fit", remedy="begin anew in another folder")
        if written_as != FORMAT:
            raise SamplingError(
                f"{path} has format {written_as}, this version reads {FORMAT}",
                remedy="use the one that wrote it",
            )
        outside = [name for name in manifest.parts if not PART_NAME.fullmatch(name)]
        if outside:
            raise SamplingError(
                f"{path} names {outside[0]!r}, which is no part's name",
                remedy="begin anew in another folder",
            )
        return manifest

    @property
    def far(self) -> str:
        """How far the run has come, in words; nothing, where it has not said so."""
        done, of, unit = (self.progress.get(name, "") for name in ("done", "of", "unit"))
        return f"{done:,}{f' of {of:,}' if of else ''} {unit}" if self.progress else ""

    def read(self, folder: Path, name: str) -> bytes:
        """The bytes of a part, compared with its checksum."""
        said = _damage(folder / name, self.parts[name])
        if said:
            raise DamagedError(f"{said}", remedy="restore it, or begin anew in another folder")
        return (folder / name).read_bytes()

    def damage(self, folder: Path) -> list[str]:
        """What is wrong with the files of the parts, each with its name."""
        return [said for name, part in self.parts.items() if (said := _damage(folder / name, part))]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that somebody may be writing to."""
    path = folder / MANIFEST
    if not is_folder(folder):
        raise SamplingError(f"{folder} is no folder", remedy="name one that a run was kept in with --checkpoint")
    if not path.is_file():
        raise SamplingError(
            f"{folder} holds no {MANIFEST}, so that it is no checkpoint",
            remedy="name a folder that is one",
        )
    try:
        return Manifest.decode(path.read_bytes(), path)
    except OSError as error:
        raise SamplingError(f"{path} cannot be read ({error.strerror})", remedy="make it readable") from error


class Store:
    """A folder in which one run is kept, locked by this process until it is closed."""

    def __init__(self, folder: str | Path, resume: bool = True) -> None:
        """Lock the folder, made if need be, and check every part; without ``resume`` one with a run is refused."""
        self.folder = Path(os.path.abspath(folder))  # a user's code may go to another folder meanwhile
        self.manifest: Manifest | None = None
        try:
            self._made = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = _take_lock(self.folder)
        except OSError as error:
            self._refuse(self.folder, error)
        except ValueError as error:  # its name holds a NUL
            raise SamplingError(
                f"the checkpoint {str(folder)!r} cannot be written ({error})", remedy="write a name"
            ) from error
        try:
            self._look_around(resume)
        except OSError as error:
            self.close()
            self._refuse(self.folder, error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Free the lock; whoever has stopped the run with Ctrl-C is told what there is of it."""
        if isinstance(error, KeyboardInterrupt) and self.manifest is not None and self.manifest.far:
            error.add_note(f"{self.manifest.far} are kept in {self.folder}")
        self.close()

    def close(self) -> None:
        """Free the lock, as the kernel does where a process is killed; folders made for a run that did not begin go."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._lock, b" " * LOCK_BYTES, 0)
            if self.manifest is None and self._made:
                self._remove([LOCK])
                with contextlib.suppress(OSError):  # somebody else may have put something there
                    for place in self._made:
                        place.rmdir()
            os.close(self._lock)
            self._lock = -1

    def check_kind(self, kind: str) -> None:
        """Refuse to go on with a run of another command; nothing else need be known for that."""
        if self.manifest is not None and self.manifest.kind != kind:
            raise SamplingError(
                f"{self.folder} holds a run of {self.manifest.kind}, not of {kind}",
                remedy="choose another folder",
            )

    def begin(self, kind: str, settings: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Write down what the run is; where there is a run already, refuse to go on with another one."""
        asked: dict[str, Any] = json.loads(json.dumps(settings))
        if self.manifest is None:
            now = _now()
            self._write_manifest(Manifest(kind, asked, dict(versions), begun=now, written=now))
            return
        self.check_kind(kind)
        for name, old, new in _differences(self.manifest.settings, asked):
            raise SamplingError(
                f"{self.folder} holds a run with another {name} ({_short(old)}, not {_short(new)})",
                remedy="ask for the same again, or choose another folder",
            )

    @property
    def run(self) -> Manifest:
        """The manifest of a run that has begun."""
        assert self.manifest is not None
        return self.manifest

    def names(self, prefix: str) -> list[str]:
        """The parts whose names begin so, in order."""
        return sorted(name for name in self.run.parts if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        """The bytes of a part."""
        return self.run.read(self.folder, name)

    def commit(
        self,
        new: Mapping[str, bytes],
        drop: Iterable[str] = (),
        progress: dict[str, Any] | None = None,
        finished: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Add new parts and leave others out, all at once: a kill in between leaves the folder as it was.

        A part never changes: what takes its place has another name. Given ``settings`` take the place of the run's own.
        """
        drop, parts = list(drop), dict(self.run.parts)
        assert not parts.keys() & new.keys()
        if outside := [name for name in new if not PART_NAME.fullmatch(name)]:  # a worker may send any
            raise SamplingError(
                f"{outside[0]!r} is no part's name",
                remedy="write letters, digits, and - . _ between them",
            )
        parts |= {name: Part(hashlib.sha256(data).hexdigest(), len(data)) for name, data in new.items()}
        for name in drop:
            del parts[name]
        progress = self.run.progress if progress is None else progress
        changed = replace(self.run, parts=parts, written=_now(), progress=progress, finished=finished)
        try:
            for name, data in new.items():
                self._write(name, data)
            self._write_manifest(changed if settings is None else replace(changed, settings=dict(settings)))
        except SamplingError:
            self._remove(new)  # a full disk has no room for what is not listed
            raise
        self._remove(drop)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def _write_manifest(self, manifest: Manifest) -> None:
        self._write(MANIFEST, manifest.encode())
        self.manifest = manifest

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        except OSError as error:
            self._refuse(path, error)

    def _look_around(self, resume: bool) -> None:
        """Read the manifest and check the parts, if there are any; what a killed process left half written goes."""
        self._refuse_linked_folders()
        (self.folder / (MANIFEST + NEW)).unlink(missing_ok=True)
        if not (self.folder / MANIFEST).exists():
            return
        self.manifest = read_manifest(self.folder)
        if not resume:
            raise SamplingError(f"{self.folder} holds a run already", remedy="add --resume or choose another folder")
        for said in self.manifest.damage(self.folder):
            raise DamagedError(f"{said}", remedy="restore it, or begin anew in another folder")
        for leftover in self.folder.glob(f"**/*{NEW}"):
            leftover.unlink(missing_ok=True)

    def _refuse_foreign(self) -> None:
        """Leave a folder of somebody else as it is."""
        names = {path.name for path in self.folder.iterdir()}
        foreign = sorted(names - {LOCK, MANIFEST + NEW, RAY})
        if foreign and MANIFEST not in names:
            raise SamplingError(
                f"{self.folder} holds other files ({foreign[0]})",
                remedy="choose a new or an empty folder",
            )

    def _refuse_linked_folders(self) -> None:
        """Raise an error if a link to a folder would make the run write outside its own folder."""
        for place, folders, _ in os.walk(self.folder):
            for path in (Path(place, name) for name in folders):
                if path.is_symlink():
                    raise SamplingError(
                        f"{path} is a link to a folder, and checkpoints do not follow links",
                        remedy="replace it by the folder itself, or choose another checkpoint folder",
                    )
            if place == str(self.folder) and RAY in folders:
                folders.remove(RAY)  # Ray makes links of its own there

    def _refuse(self, path: Path, error: OSError) -> NoReturn:
        remedy = "choose another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "what was kept before is whole: make room and resume"
        cause = error.strerror
        if isinstance(error, FileExistsError):
            cause = "it is a file" if path.exists() else "it is a link that leads nowhere"
        raise SamplingError(f"the checkpoint {path} cannot be written ({cause})", remedy=f"{remedy}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step: at every moment its name stands for all of the old bytes or all of the new ones.

    The new bytes are first written to a file with the suffix ``.new``. A link of that name is removed, not followed.
    """
    new = path.with_name(path.name + NEW)
    try:
        new.unlink(missing_ok=True)
        with new.open("xb") as file:  # creates the file, or fails
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system can do this
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, is to outlive a power cut
        finally:
            os.close(folder)


class LineFile:
    """A file that holds whole lines at every moment. What was in it before stays until there is a line to write."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = Path(os.path.realpath(path)), -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file; whoever has pressed Ctrl-C is told what is in it."""
        if isinstance(error, KeyboardInterrupt) and self.path.is_file():
            with self.path.open("rb") as file:
                error.add_note(f"{sum(1 for _ in file):,} lines are in {self.path}")
        if self._file >= 0:
            os.close(self._file)

    def write(self, lines: Sequence[str]) -> None:
        """Add lines, each at one go; where the disk is full, those that are whole are kept."""
        data = [f"{line}\n".encode() for line in lines]
        try:
            if self._file < 0:
                data = self._begin(data)
            for line in data:
                written = os.write(self._file, line)
                if written < len(line):
                    os.ftruncate(self._file, os.lseek(self._file, -written, os.SEEK_CUR))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.path.is_file():
                os.fsync(self._file)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SamplingError(
                f"{self.path} cannot be written",
                cause=error.strerror,
                remedy="the lines before are whole: make room, or choose another file",
            ) from error

    def _begin(self, data: list[bytes]) -> list[bytes]:
        """Open the file, its first lines in place of what was there; what is left to be written is returned."""
        if (self.path.is_file() or not self.path.exists()) and os.access(self.path.parent, os.W_OK):
            write_whole(self.path, b"".join(data))
            self._file, data = os.open(self.path, os.O_WRONLY | os.O_APPEND), []
        else:  # a pipe, a terminal, or a file in somebody else's folder
            self._file = os.open(self.path, os.O_WRONLY | os.O_TRUNC)
        return data


def _take_lock(folder: Path) -> int:
    """Lock the folder and return the descriptor of the lock file, which holds the id of this process."""
    path = folder / LOCK
    lock = _open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, LOCK_BYTES, 0).decode(errors="replace").strip() or "another"
        os.close(lock)
        raise SamplingError(
            f"{folder} is in use by process {holder}",
            remedy="wait until it has ended, or choose another folder",
        ) from None
    except OSError:
        os.close(lock)
        raise
    if not os.fstat(lock).st_nlink:  # another process removed the file and its folder before the lock was taken
        os.close(lock)
        return _take_lock(folder)
    try:
        if not re.fullmatch(rb"[0-9 ]{0,%d}" % LOCK_BYTES, os.pread(lock, LOCK_BYTES + 1, 0)):
            raise _lock_error(path, "holds data that no run has written")
        os.pwrite(lock, str(os.getpid()).encode().ljust(LOCK_BYTES), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _open_lock(path: Path) -> int:
    """Open or create a lock file: a regular file with one name, so that no other file is written through a link."""
    if path.is_symlink():
        raise _lock_error(path, "is a symbolic link")
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK
    lock = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # it may have become a link meanwhile
    status = os.fstat(lock)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return lock
    os.close(lock)
    raise _lock_error(path, "has more than one hard link" if stat.S_ISREG(status.st_mode) else "is not a regular file")


def _lock_error(path: Path, cause: str) -> SamplingError:
    return SamplingError(
        f"the lock {path} {cause} and is not used",
        remedy="remove it, or choose another checkpoint folder",
    )


def _damage(path: Path, part: Part) -> str | None:
    """What is wrong with a part's file, if anything."""
    try:
        if not path.exists():
            return f"{path} is missing"
        if not path.is_file() or path.stat().st_size != part.size:
            return f"{path} is damaged: it does not have its {part.size} bytes"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                return f"{path} is damaged: its checksum does not fit"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ, by name, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{name} {key}".strip())
    elif json.dumps(old) != json.dumps(new):  # so that NaN equals itself
        yield name, old, new


def _short(value: Any) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}…"


def _as_json(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
