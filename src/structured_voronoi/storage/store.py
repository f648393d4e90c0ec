"""Checkpoint folders.

A file is written under another name, flushed to the disk and renamed; then the manifest, which lists the files with
their checksums, is replaced in the same way. A run that is killed at any moment leaves what its last manifest lists.
Other files are ignored and overwritten. One process at a time holds the lock of a folder and writes to it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.storage.files import NEW_SUFFIX, write_atomically
from structured_voronoi.storage.locks import LOCK, FolderLock
from structured_voronoi.storage.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Part,
    check_part_names,
    read_manifest,
)

RAY_FOLDER = "ray"
"""The folder within a checkpoint folder where a Ray cluster has its files while it runs."""


class Store:
    """A checkpoint folder, locked by this process until it is closed.

    Parameters
    ----------
    folder
        The folder, which is created if it does not exist. All its files are checked.
    resume
        Without it, a folder that holds a run is refused.

    Raises
    ------
    DamagedError
        If a file is not what was written.
    SamplingError
        If the folder is in use, holds other files, or cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with Store(tempfile.mkdtemp()) as store:
    ...     store.begin("example", settings={"seed": 0}, versions={})
    ...     store.commit({"numbers.json": b"[1, 2]"}, progress={"done": 2, "of": 2, "unit": "numbers"}, finished=True)
    ...     store.read("numbers.json")
    b'[1, 2]'
    """

    def __init__(self, folder: str | Path, resume: bool = True) -> None:
        self.folder = Path(os.path.abspath(folder))  # a user's code may change the current folder
        self.manifest: Manifest | None = None
        try:
            self._created = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_other_files()
            self._lock = FolderLock(self.folder)
        except OSError as error:
            self._refuse(self.folder, error)
        except ValueError as error:  # the name holds a NUL
            raise SamplingError(
                f"{str(folder)!r} is not a folder name", argument="checkpoint", cause=error, remedy="use another name"
            ) from error
        try:
            self._check_contents(resume)
        except OSError as error:
            self.close()
            self._refuse(self.folder, error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock; after Ctrl-C, add a note with the saved progress to the error."""
        if isinstance(error, KeyboardInterrupt) and self.manifest is not None and self.manifest.progress:
            error.add_note(f"{self.manifest.progress_text} are saved in {self.folder}")
        self.close()

    def close(self) -> None:
        """Release the lock, and remove folders that were created for a run that did not begin."""
        if self._lock.is_held:
            self._lock.clear()
            if self.manifest is None and self._created:
                self._remove([LOCK])
                with contextlib.suppress(OSError):  # unless another process has put something there
                    for place in self._created:
                        place.rmdir()
            self._lock.release()

    def check_kind(self, kind: str) -> None:
        """Refuse to resume a run of another command."""
        if self.manifest is not None and self.manifest.kind != kind:
            raise SamplingError(
                f"{self.folder} holds a run of {self.manifest.kind}, not of {kind}",
                remedy="choose another folder",
            )

    def begin(self, kind: str, settings: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Write the settings of a new run, or check that the saved run has the same ones."""
        requested: dict[str, Any] = json.loads(json.dumps(settings))
        if self.manifest is None:
            now = _now()
            self._write_manifest(Manifest(kind, requested, dict(versions), begun=now, saved=now))
            return
        self.check_kind(kind)
        for name, saved, new in _differences(self.manifest.settings, requested):
            raise SamplingError(
                f"{self.folder} holds a run with {name} = {_shorten(saved)}, not {_shorten(new)}",
                remedy="use the same settings, or choose another folder",
            )

    @property
    def run(self) -> Manifest:
        """The manifest of a run that has begun."""
        assert self.manifest is not None
        return self.manifest

    @property
    def is_finished(self) -> bool:
        """True if the run is complete."""
        return self.manifest is not None and self.manifest.finished

    @property
    def has_files(self) -> bool:
        """True if the run has saved anything."""
        return self.manifest is not None and bool(self.manifest.parts)

    def __contains__(self, name: str) -> bool:
        return self.manifest is not None and name in self.manifest.parts

    def names(self, prefix: str) -> list[str]:
        """Names of the files that begin with ``prefix``, sorted."""
        return sorted(name for name in self.run.parts if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        return self.run.read(self.folder, name)

    def commit(
        self,
        new: Mapping[str, bytes],
        drop: Iterable[str] = (),
        progress: dict[str, Any] | None = None,
        finished: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Add and remove files in one step: if the process is killed, the folder is as before or as after it.

        Parameters
        ----------
        new
            The data of new files. A file never changes; another one takes its place.
        drop
            Names of files to be removed.
        progress
            The progress of the run, if it has changed.
        finished
            True if the run is complete.
        settings
            New settings of the run, if they have changed.
        """
        drop, parts = list(drop), dict(self.run.parts)
        assert not parts.keys() & new.keys()
        check_part_names(new, self.folder)
        parts |= {name: Part.of(data) for name, data in new.items()}
        for name in drop:
            del parts[name]
        changed = replace(
            self.run,
            parts=parts,
            saved=_now(),
            progress=self.run.progress if progress is None else progress,
            finished=finished,
            settings=self.run.settings if settings is None else dict(settings),
        )
        try:
            for name, data in new.items():
                self._write(name, data)
            self._write_manifest(changed)
        except SamplingError:
            self._remove(new)  # a full disk has no room for files that are not listed
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
            write_atomically(path, data)
        except OSError as error:
            self._refuse(path, error)

    def _check_contents(self, resume: bool) -> None:
        """Read the manifest, check the files and remove what a killed process did not finish writing."""
        self._refuse_links()
        (self.folder / (MANIFEST + NEW_SUFFIX)).unlink(missing_ok=True)
        if not (self.folder / MANIFEST).exists():
            return
        self.manifest = read_manifest(self.folder)
        if not resume:
            raise SamplingError(f"{self.folder} holds a run", remedy="resume it, or choose another folder")
        for damage in self.manifest.find_damage(self.folder):
            raise DamagedError(damage, remedy="restore it, or use a new checkpoint folder")
        for unfinished in self.folder.glob(f"**/*{NEW_SUFFIX}"):
            unfinished.unlink(missing_ok=True)

    def _refuse_other_files(self) -> None:
        """Raise an error if the folder holds files but no checkpoint."""
        names = {path.name for path in self.folder.iterdir()}
        others = sorted(names - {LOCK, MANIFEST + NEW_SUFFIX, RAY_FOLDER})
        if others and MANIFEST not in names:
            raise SamplingError(
                f"{self.folder} holds other files ({others[0]})", remedy="choose a new or an empty folder"
            )

    def _refuse_links(self) -> None:
        """Raise an error if a link would make the run write outside its folder."""
        for place, folders, _ in os.walk(self.folder):
            for path in (Path(place, name) for name in folders):
                if path.is_symlink():
                    raise SamplingError(
                        f"{path} is a link to a folder, and checkpoints do not follow links",
                        remedy="replace it by the folder itself, or choose another checkpoint folder",
                    )
            if place == str(self.folder) and RAY_FOLDER in folders:
                folders.remove(RAY_FOLDER)  # Ray creates links there

    def _refuse(self, path: Path, error: OSError) -> NoReturn:
        remedy, cause = "choose another folder", error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space and resume; what was saved before is complete"
        if isinstance(error, FileExistsError):
            cause = "it is a file" if path.exists() else "it is a link whose target does not exist"
        raise SamplingError(f"the checkpoint {path} cannot be written", cause=cause, remedy=remedy) from error


class TemporaryStore(Store):
    """The store of a run without a checkpoint folder."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="svs-")
        super().__init__(self._temporary.name)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()


def _differences(saved: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ: their names and both values."""
    if isinstance(saved, dict) and isinstance(new, dict):
        for key in [*saved, *(key for key in new if key not in saved)]:
            yield from _differences(saved.get(key), new.get(key), f"{name} {key}".strip())
    elif json.dumps(saved) != json.dumps(new):  # so that NaN equals itself
        yield name, saved, new


def _shorten(value: Any, longest: int = 60) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[:longest]}…"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
