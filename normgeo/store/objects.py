"""A store in an object store, through obstore: every file an object below one URL.

An object is there whole or not at all; a chunk is gathered in memory and put at once. `create` is a PUT that fails
where there is an object, and so no row is ever committed twice, whatever became of the lock. The lock is an object
that a run's first process renews: it says who writes, and is taken over from a process that is known to be dead, or
that has not renewed it for a minute: by then the run's other processes, if it has any, have missed it and ended.
"""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from normgeo.errors import StoreError
from normgeo.store.holder import Held, holder, is_dead, read_holder, still_held, version_of
from normgeo.store.storage import Disk, NewChunk, Storage
from normgeo.store.workers import in_order
from normgeo.system.files import passing_folder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Objects", "storage_at"]

T = TypeVar("T")
R = TypeVar("R")

SCHEMES = ("s3", "gs")
LARGEST = 32 << 20  # a chunk lies in memory until it is put
THREADS = 8  # one upload alone does not fill a line
LEASE_SECONDS = 60.0
REFUSED = ("403", "401", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
TRY_SECONDS = 10  # to find out whether there is anybody at the address
PATIENT = {
    "max_retries": 1000, "retry_timeout": datetime.timedelta(minutes=3),
    "backoff": {"init_backoff": datetime.timedelta(milliseconds=100), "max_backoff": datetime.timedelta(seconds=15),
                "base": 2},
}  # fmt: skip
"""How a request is tried again: a service that is started again refuses connections for a while."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def storage_at(address: str | Path | Storage) -> Storage:
    """The storage at a directory or at a URL, s3://bucket/prefix or gs://bucket/prefix.

    Raises:
        StoreError: another kind of URL or one that was a Path, obstore is not installed, or the bucket is out of reach.
    """
    if isinstance(address, Storage):
        return address
    text = str(address)
    if (lost := re.match(r"(\w\w+):/[^/]", text)) and (lost[1] in SCHEMES or not Path(f"{lost[1]}:").is_dir()):
        raise StoreError(f"{text} has lost a slash, as URLs do that become a Path; give it as a string, with ://")
    if "://" not in text:
        return Disk(Path(text))
    if text.split("://")[0] not in SCHEMES:
        raise StoreError(f"{text}: stores lie in directories, at s3://bucket/prefix or at gs://bucket/prefix")
    return Objects(text)


class Objects(Storage):
    """Objects below a URL; endpoint and credentials are taken from the environment.

    Args:
        address: s3://bucket/prefix or gs://bucket/prefix.

    Raises:
        StoreError: obstore is not installed, there is no such bucket, or it cannot be reached with these credentials.
    """

    threads = THREADS
    largest = LARGEST

    def __init__(self, address: str) -> None:
        self.address = self.absolute = address.rstrip("/")
        if re.match(r"\w+://[^/]*@", address):  # which messages and the record of the command would repeat
            raise StoreError("a store's URL takes no user and no key: credentials are taken from the environment alone")
        if not re.fullmatch(r"\w+://[^/]+/.*[^/]", self.address):
            raise StoreError(f"{address} names no place inside a bucket; give s3://bucket/prefix or gs://bucket/prefix")
        if re.search(r"[?#%\\\s]", self.address) or {"", ".", ".."} & set(self.address.split("/")[3:]):
            raise StoreError(f"{address} would be read as another place; give a prefix of plain characters")
        for name in ENDPOINTS if self.address.startswith("s3:") else ():
            if (endpoint := os.environ.get(name)) and not re.match(r"https?://[^/]", endpoint):
                raise StoreError(f"{name} must begin with http:// or https:// and name a host, received {endpoint!r}")
        try:
            import obstore
        except ImportError as error:
            raise StoreError(f"{address} needs obstore: pip install 'normgeo[objects]'") from error
        self._ob, self._lost, self._held, self._writing = obstore, threading.Event(), None, False
        patience = datetime.timedelta(seconds=TRY_SECONDS)
        with self._explained():
            self._ob.list_with_delimiter(self._open(retries={"max_retries": 2, "retry_timeout": patience}), "commits")
            self._client, self._process = self._open(), os.getpid()

    def __reduce__(self) -> tuple[type[Objects], tuple[str]]:
        """Opened again where it is unpickled."""
        return Objects, (self.address,)

    @property
    def _objects(self) -> ObjectStore:
        """The client, whose threads a forked process does not have."""
        if os.getpid() != self._process:
            raise StoreError(
                f"{self.address} was opened before this process was forked, where nothing answers; start workers by "
                "spawn (multiprocessing_context='spawn' of a DataLoader)"
            )
        return self._client

    def _open(self, folder: str = "", retries: Any = PATIENT) -> ObjectStore:
        from obstore.store import from_url

        return from_url(f"{self.address}/{folder}".rstrip("/"), retry_config=retries)

    @contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        """Errors of the service as one line each; a missing object stays a FileNotFoundError."""
        from obstore import exceptions

        where = self.at(name) if name else self.address
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except (exceptions.BaseError, FileNotFoundError, PermissionError) as error:
            reason = _reason(error)
            if "NoSuchBucket" in reason:
                bucket = self.address.split("/")[2]
                raise StoreError(f"{where}: there is no bucket {bucket}; create it, or give another --store") from error
            if isinstance(error, FileNotFoundError):
                raise
            safe = f"; what is committed is safe, and --resume {self.address} goes on" if self._writing else ""
            if any(word in reason for word in REFUSED):
                raise StoreError(
                    f"{where}: the credentials are refused ({reason}); see that the environment has the right ones "
                    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS), which may list, "
                    f"read, write and delete there{safe}"
                ) from error
            raise StoreError(
                f"{where} cannot be reached ({reason}); see that network, endpoint and credentials are right "
                f"(AWS_ENDPOINT_URL, AWS_REGION; AWS_ALLOW_HTTP=true for an http endpoint){safe}"
            ) from error

    def at(self, name: str) -> str:
        """An object's URL."""
        return f"{self.address}/{name}"

    def occupied(self) -> bool:
        """Whether there is an object that is neither a lock nor what a killed writer had not finished."""
        with self._explained():
            paths = (found["path"] for page in self._ob.list(self._objects) for found in page)
            return any(path != "lock" and not path.startswith("scratch/") for path in paths)

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        with suppress(FileNotFoundError), self._explained(name):
            return self._ob.head(self._objects, name)["size"]
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the objects right below a folder: a thousand of them by one request."""
        with self._explained(folder):
            found = self._ob.list_with_delimiter(self._objects, folder)["objects"]
        return dict(sorted((each["path"].removeprefix(f"{folder}/"), each["size"]) for each in found))

    def read(self, name: str) -> bytes:
        """All of an object."""
        with self._explained(name):
            return bytes(self._ob.get(self._objects, name).bytes())

    def read_range(self, name: str, start: int, n: int) -> np.ndarray:
        """Bytes of an object, by one request."""
        with self._explained(name):
            try:
                found = self._ob.get_range(self._objects, name, start=start, length=n)
            except self._ob.exceptions.BaseError as error:
                if "InvalidRange" not in _reason(error) and "416" not in _reason(error):
                    raise
                found = b""  # it ends before
        return np.frombuffer(memoryview(found), np.uint8).copy()

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Put an object, in one request."""
        self._refuse_if_lost()
        with self._explained(name):
            self._ob.put(self._objects, name, content, use_multipart=False)

    def create(self, name: str, content: bytes) -> None:
        """Put an object that is not there yet: the service refuses it where there is one.

        One that has this content already is from an earlier try, whose answer was lost.
        """
        self._refuse_if_lost()
        try:
            with self._explained(name):
                self._ob.put(self._objects, name, content, mode="create", use_multipart=False)
        except self._ob.exceptions.AlreadyExistsError as error:
            if self.read(name) == content:
                return
            raise StoreError(f"{self.at(name)} is already there: another process writes this store") from error

    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Put all objects, the deepest first."""
        for name in sorted(files, key=lambda name: (-name.count("/"), name)):
            self.put(f"{folder}/{name}", files[name])

    def chunk(self, name: str) -> NewChunk:
        """Bytes in memory until they are put."""
        return _ChunkBuffer(self, name)

    def sync(self, names: Iterable[str]) -> None:
        """Nothing: what was put is safe."""

    def delete(self, name: str) -> None:
        """Remove an object."""
        with self._explained(name):
            self._ob.delete(self._objects, [name])

    def discard(self, folder: str | None = None) -> None:
        """Remove all objects, or those in a folder, but the lock, without which nothing is removed: it is renewed."""
        with self._explained():
            for page in self._ob.list(self._objects, folder) if self._renewed() else ():
                self._ob.delete(self._objects, [found["path"] for found in page if found["path"] != "lock"])

    @contextmanager
    def results(self) -> Iterator[Path]:
        """A directory whose files are put at the end."""
        with passing_folder() as scratch:
            yield scratch
            for file in sorted(p for p in scratch.rglob("*") if p.is_file()):
                self.put(file.relative_to(scratch).as_posix(), file.read_bytes())

    def free(self) -> int | None:
        """Nobody knows."""
        return None

    def rate(self, nbytes: int = 8 << 20) -> float:
        """Bytes a second of one upload."""
        content, began = np.random.default_rng(0).bytes(nbytes), time.perf_counter()
        with self._tried(content):
            return nbytes / (time.perf_counter() - began)

    @contextmanager
    def _tried(self, content: bytes) -> Iterator[str]:
        """An object that is put, and removed again."""
        name = f"scratch/{uuid.uuid4().hex}"
        try:
            self.put(name, content)
            yield name
        finally:
            self.delete(name)

    def zarr(self, folder: str) -> Any:
        """A store of zarr's own of objects, through obstore."""
        from zarr.storage import ObjectStore

        return ObjectStore(self._open(folder), read_only=True)

    def each(self, do: Callable[[T], R], of: Iterable[T]) -> Iterable[R]:
        """On threads, for most of the time goes by waiting for the service; a few are done ahead of what is taken."""
        with ThreadPoolExecutor(self.threads) as pool:
            yield from (found for _, found in in_order(of, lambda one: pool.submit(do, one), 2 * self.threads))

    # --- the lock ----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, run: str | None = None, *, shared: bool = False) -> Iterator[str]:
        """Hold an object that says who writes, and renew it; a run's other processes find its name there."""
        ended = threading.Event()
        if run is not None:
            if read_holder(self.read("lock"))["run"] != run:
                raise StoreError(f"{self} is not the store that this run's first process writes")
            beside = threading.Thread(target=self._follow, args=(run, ended), daemon=True)
        else:
            run = uuid.uuid4().hex
            self._held = Held(run, shared, self._take(holder(run, shared)))
            beside = threading.Thread(target=self._renew, args=(ended,), daemon=True)
        beside.start()
        self._writing = True
        try:
            self.discard("scratch")  # what was tried by a writer that was killed
            yield run
        finally:
            self._writing = False
            ended.set()
            beside.join()
            if self._held is not None and not self._lost.is_set():
                with suppress(StoreError):  # it would hide why this ends; the lock is taken over after a while
                    self.delete("lock")

    def _take(self, mine: bytes) -> Any:
        try:
            with self._explained("lock"), suppress(self._ob.exceptions.AlreadyExistsError):
                return self._put_lock(mine, "create")
            with self._explained("lock"):
                meta, writer = self._lock()
                silent = (self._now() - meta["last_modified"]).total_seconds()
                if silent < LEASE_SECONDS and (writer["shared"] or not is_dead(writer)):
                    raise StoreError(still_held(str(self), writer, silent, LEASE_SECONDS))
                return self._put_lock(mine, version_of(meta))
        except (FileNotFoundError, self._ob.exceptions.PreconditionError) as error:
            raise StoreError(f"another process has just begun or ended writing {self}; try again") from error

    def _now(self) -> datetime.datetime:
        """The time by the service's clock, which says when the lock was put; this machine's may be another."""
        with self._tried(b"") as name:
            return self._ob.head(self._objects, name)["last_modified"]

    def _lock(self) -> tuple[Mapping[str, Any], dict[str, Any]]:
        found = self._ob.get(self._objects, "lock")
        return found.meta, read_holder(bytes(found.bytes()))

    def _put_lock(self, mine: bytes, mode: Any) -> Any:
        """The version of the lock that this puts, or that an earlier try has put whose answer was lost."""
        try:
            return version_of(self._ob.put(self._objects, "lock", mine, mode=mode))
        except (self._ob.exceptions.AlreadyExistsError, self._ob.exceptions.PreconditionError):
            meta, writer = self._lock()
            if writer != read_holder(mine):
                raise
            return version_of(meta)

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(LEASE_SECONDS / 4):
            self._renewed()

    def _follow(self, run: str, ended: threading.Event) -> None:
        """Look whether the run still holds the lock; half of what others wait without a sign of it are enough."""
        seen, heard = None, time.monotonic()
        while not ended.wait(LEASE_SECONDS / 8) and not self._lost.is_set():
            try:
                _, now = self._lock()
                if now["run"] != run:
                    self._lost.set()
                elif now != seen:
                    seen, heard = now, time.monotonic()
            except FileNotFoundError:
                self._lost.set()
            except self._ob.exceptions.BaseError:  # the network may come back
                pass
            if time.monotonic() - heard > LEASE_SECONDS / 2:
                self._lost.set()

    def _renewed(self) -> bool:
        """Say that this run still writes; whether it does."""
        held = self._held
        if held is None or self._lost.is_set():
            return False
        with held.renewing:
            try:
                mine = holder(held.run, held.shared, held.times + 1)
                held.version = self._put_lock(mine, held.version)
                held.times += 1
            except (FileNotFoundError, self._ob.exceptions.PreconditionError):
                self._lost.set()
                return False
            except self._ob.exceptions.BaseError:  # the network may come back
                return False
        return True

    def _refuse_if_lost(self) -> None:
        if self._lost.is_set():
            raise StoreError(
                f"another process has taken over {self}, or will: this one, or the first of its run, was not heard of; "
                "it ends"
            )


class _ChunkBuffer(NewChunk):
    def __init__(self, objects: Objects, name: str) -> None:
        self._objects, self._name, self._content = objects, name, bytearray()

    def append(self, piece: np.ndarray) -> None:
        self._content += piece.data

    def finish(self) -> None:
        self._objects.put(self._name, memoryview(self._content))
        self._content = bytearray()

    def abandon(self) -> None:
        self._content = bytearray()


def _reason(error: BaseException) -> str:
    """The service's own words, without addresses of requests and debug output."""
    text = str(error).split("\n\nDebug source")[0]
    code, message = (re.search(rf"<{tag}>(.*?)</{tag}>", text) for tag in ("Code", "Message"))
    if code and message:
        return f"{code[1]}: {message[1]}"
    return re.sub(r"\s+", " ", text.split(" - ", 1)[-1])[:200]
