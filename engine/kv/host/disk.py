"""Blocks in files: the tier below a machine's host arena, which outlives its workers.

What is stored in the arena is written behind: a thread writes it, a group to a file, and what comes
faster than it writes is dropped. All workers of a machine share the folder, and each keeps an index
of its own in memory, from the heads of the files.

    head     magic, blocks, bytes of each, namespace; name and digest of each block; a hash of that
    blocks   from a multiple of 4096 on

A file is written by one writer at a time under one name, and renamed when it is whole; what a
writer finds under that name was left by one that died. No write is waited for until it is on the
device, so after a crash of the machine a file may be torn: a head that is not what its hash says
makes the file void, and each block's digest is checked where it is loaded to. Files of other
namespaces (another model, layout or key) are not read; they count, and are evicted alike: those
used longest ago go first, by the time of their last change. Only this user can read them.

The file of the writers' lock holds the bytes of all files, so the folder is listed for a write only
when it seems full; then a sixteenth of it is made free. What was removed otherwise, or never came
to be, counts until then.

Knows no tensors; one thread writes, one reads, and any may look up.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.kv.hashes import HASH_BYTES

KEY = "cache.disk_path"
KEY_BYTES = 32

_MAGIC = b"LAPSKVD1"
_HEAD = struct.Struct("<8sQQ16s")
_ENTRY = struct.Struct(f"<{HASH_BYTES}sq")
_CHECK_BYTES = 16
_ALIGNMENT = 4096
_SUFFIX, _PARTIAL = ".kv", "part"
_TOTAL = struct.Struct("<q")
_FREED_SHARE = 16
_LIST_EVERY_S = 1.0

Row = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block that a file should hold."""

    file: str
    offset: int
    block_hash: bytes
    digest: int  # as of the block of the arena


class DiskFiles:
    """One worker's end of the folder."""

    def __init__(self, path: Path, *, num_bytes: int, block_bytes: int, namespace: bytes) -> None:
        """num_bytes: of all files. namespace: 16 bytes; of what must be equal for those who share.

        Raises ConfigError if the folder cannot be used, or other users can.
        """
        assert len(namespace) == 16, f"a namespace of {len(namespace)} bytes"
        self.folder = _private_folder(path)
        self.num_bytes = num_bytes
        self._block_bytes = block_bytes
        self._namespace = namespace
        self._index: dict[bytes, DiskBlock] = {}
        self._files: dict[str, list[bytes]] = {}  # name -> hashes; void files have none
        self._listed = -_LIST_EVERY_S, -1  # when, and the folder's time of change
        self.num_changes = 0  # of the index
        self.num_evicted = 0  # blocks of this namespace
        self.num_void = 0  # files whose head is not what was written
        self.refresh(time.monotonic())

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    def hashes(self) -> set[bytes]:
        """Names of all blocks; a copy."""
        return set(self._index.copy())

    def get(self, block_hash: bytes) -> DiskBlock | None:
        return self._index.get(block_hash)

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, block: DiskBlock, row: Row) -> bool:
        """Copies a block to memory; False if it is gone. What it is, its digest says."""
        with suppress(OSError):
            fd = os.open(self.folder / block.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.preadv(fd, [row.data], block.offset) == self._block_bytes:
                    os.utime(fd)  # used now
                    return True
            finally:
                os.close(fd)
        self.forget(block)
        return False

    def forget(self, block: DiskBlock) -> None:
        """Removes the file of a block that is gone or wrong: nothing else in it is trusted."""
        with suppress(OSError):
            (self.folder / block.file).unlink()
        self._drop(block.file)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[bytes, int, Row]]) -> bool:
        """Stores new blocks (hash, digest, bytes) in one file; False if it has no room at all.

        Raises OSError.
        """
        name = f"{self._namespace.hex()}-{secrets.token_hex(8)}{_SUFFIX}"
        entries = [_ENTRY.pack(block_hash, digest) for block_hash, digest, _ in blocks]
        head = _HEAD.pack(_MAGIC, len(blocks), self._block_bytes, self._namespace)
        head += b"".join(entries)
        head += hashlib.blake2b(head, digest_size=_CHECK_BYTES).digest()
        first = _first_block(len(blocks))
        size = first + len(blocks) * self._block_bytes
        if size > self.num_bytes:
            return False
        partial = self.folder / _PARTIAL
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._locked() as lock:
            self._make_room(lock, size)
            try:
                with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
                    file.write(head.ljust(first, b"\0"))
                    for _, _, row in blocks:
                        file.write(row.data)
                partial.rename(self.folder / name)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        self._add(name, [(block_hash, digest) for block_hash, digest, _ in blocks])
        return True

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """One writer of the machine at a time, or they would exceed the bound together."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.folder / "lock", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _make_room(self, lock: int, size: int) -> None:
        """Counts `size` more bytes, and removes files if they would be too many."""
        counted = os.pread(lock, _TOTAL.size, 0)
        total = _TOTAL.unpack(counted)[0] if len(counted) == _TOTAL.size else self.num_bytes
        if total + size > self.num_bytes:
            total = self._evict(size)
        # Before the file is there: a writer that dies may count too much, never too little.
        os.pwrite(lock, _TOTAL.pack(total + size), 0)

    def _evict(self, size: int) -> int:
        """Removes the files used longest ago until `size` more bytes fit; returns what is left."""
        files = sorted((mtime_ns, num_bytes, name) for name, num_bytes, mtime_ns in self._found())
        total = sum(num_bytes for _, num_bytes, _ in files)
        if total + size <= self.num_bytes:
            return total
        for _, num_bytes, name in files:
            if total + size <= self.num_bytes - self.num_bytes // _FREED_SHARE:
                break
            (self.folder / name).unlink(missing_ok=True)
            self.num_evicted += len(self._files.get(name, ()))
            self._drop(name)
            total -= num_bytes
        return total

    # ---- what is there ---------------------------------------------------------------------------

    def refresh(self, now_s: float) -> None:
        """Takes over what other workers wrote and removed; looks at most once a second."""
        listed_s, changed_ns = self._listed
        if now_s - listed_s < _LIST_EVERY_S or self.folder.stat().st_mtime_ns == changed_ns:
            return
        self._listed = now_s, self.folder.stat().st_mtime_ns
        names = {name for name, _, _ in self._found()}
        for name in [name for name in list(self._files) if name not in names]:
            self._drop(name)
        ours = self._namespace.hex() + "-"
        for name in sorted(names):
            if name not in self._files and name.startswith(ours):
                self._add(name, self._head_of(name))

    def _found(self) -> list[tuple[str, int, int]]:
        """Name, bytes and time of change of every file of blocks."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((entry.name, status.st_size, status.st_mtime_ns))
        return found

    def _head_of(self, name: str) -> list[tuple[bytes, int]]:
        """Hash and digest of each block; none if the file is void, which removes it."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                start = file.read(_HEAD.size)
                magic, num_blocks, block_bytes, namespace = _HEAD.unpack(start)
                size = _first_block(num_blocks) + num_blocks * block_bytes
                expected = _MAGIC, self._block_bytes, self._namespace, size
                if (magic, block_bytes, namespace, os.fstat(file.fileno()).st_size) != expected:
                    raise ValueError(f"{path} is of another form")
                entries = file.read(num_blocks * _ENTRY.size)
                check = hashlib.blake2b(start + entries, digest_size=_CHECK_BYTES).digest()
                if file.read(_CHECK_BYTES) != check:
                    raise ValueError(f"{path} is not what was written")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, struct.error):
            self.num_void += 1
            path.unlink(missing_ok=True)
            return []
        return list(_ENTRY.iter_unpack(entries))

    def _add(self, name: str, blocks: Sequence[tuple[bytes, int]]) -> None:
        first = _first_block(len(blocks))
        for i, (block_hash, digest) in enumerate(blocks):
            offset = first + i * self._block_bytes
            self._index[block_hash] = DiskBlock(name, offset, block_hash, digest)
        self._files[name] = [block_hash for block_hash, _ in blocks]
        self.num_changes += 1

    def _drop(self, name: str) -> None:
        for block_hash in self._files.pop(name, []):
            found = self._index.get(block_hash)
            if found is not None and found.file == name:
                self._index.pop(block_hash, None)
        self.num_changes += 1


def kept_key(path: Path) -> bytes:
    """The key of the hashes of what the folder holds, made when there is none. Raises ConfigError.

    It names blocks, so without it nothing is found again after a restart.
    """
    file = _private_folder(path) / "key"
    fresh = file.with_name(f"key-{secrets.token_hex(8)}")
    try:
        if not file.exists():
            with os.fdopen(
                os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as new:
                new.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):
                os.link(fresh, file)  # whole, or not at all; the first one stays
            fresh.unlink()
        key = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{KEY}: {file} cannot be used: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{KEY}: {file} is not a key of {KEY_BYTES} bytes; remove it")
    return key


def _private_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be used: {error.strerror}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{KEY}: other users can open {path}, or made it; chmod it to 0700")
    return path


def _first_block(num_blocks: int) -> int:
    """Offset of the first block of a file of so many."""
    head = _HEAD.size + num_blocks * _ENTRY.size + _CHECK_BYTES
    return -(-head // _ALIGNMENT) * _ALIGNMENT
