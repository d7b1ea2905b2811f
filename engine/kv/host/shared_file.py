"""A file in shared memory that several processes map, and that the last of them removes.

The kernel keeps the books of who is alive: each member holds a lock on one byte of the file, and
loses it with its process, however that ended. Locks belong to the open file (OFD locks), so that
two members may also live in one process. A member that dies inside a critical section loses that
lock, too; what it guards must make sense at any point.

    byte 0       LIFE      who creates, joins, leaves or removes the file
    byte 1       SHARED    the reserve and the index (engine/kv/host/arena.py)
    bytes 2 ...  members: held for life        bytes 66 ...  their pools of free blocks
    byte 130     CLAIM     shared by processes that load a model first, and join then

The file is this user's alone: one that others made, or can open, is refused.

If every process was killed, the file stays: those that restart find what they had stored. They
claim it when they start (`claimed`), since loading takes minutes. When nobody has it or claims it
for a minute, a supervisor on this machine removes it (`UnusedFiles`), and so does who
finds no room for another. Knows nothing of what the file holds.
"""

import fcntl
import hashlib
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import ConfigError

FOLDER = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX = "laps-kv-"
MAX_MEMBERS = 64
SHARED = 1

_LIFE = 0
_FIRST_MEMBER = 2
_FIRST_POOL = _FIRST_MEMBER + MAX_MEMBERS
_CLAIM = _FIRST_POOL + MAX_MEMBERS
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
_LIFE_WAIT_S = 30.0
_SLOWEST_BYTES_S = 2**28  # of taking memory, on a machine that does other things: 4 s a GiB
_LEAVE_WAIT_S = 5.0
_POLL_S = 50e-6
UNUSED_S = 60.0  # a worker's process restarts within it
KEY = "cache.host_gib"


class BusyError(Exception):
    """Another process holds a lock for too long: it is stopped, or the machine is overloaded."""


def pool_byte(member: int) -> int:
    """The lock of a member's pool."""
    return _FIRST_POOL + member


class SharedFile:
    """One process's end of the file; not thread-safe."""

    def __init__(self, name: str, size: int, initialise: Callable[[memoryview], bool]) -> None:
        """Creates the file, or joins it. `initialise` is called while nobody else comes or goes.

        It gets the file's bytes, zeros if they are new. It returns False if they are another's.
        Raises ConfigError if there is no room, or the file is another's.
        """
        self.path = FOLDER / f"{PREFIX}{name}"
        self.fd = _open_locked(self.path, _LIFE_WAIT_S + size / _SLOWEST_BYTES_S)
        self._has_left = self._is_closed = False
        try:
            self.map = self._mapped(size, initialise)
            self.member = self._join()
        except BaseException:
            os.close(self.fd)
            raise
        _unlock(self.fd, _LIFE)

    def _mapped(self, size: int, initialise: Callable[[memoryview], bool]) -> mmap.mmap:
        """The file's memory; what nobody uses any more is kept only if it fits."""
        if os.fstat(self.fd).st_size in (0, size):
            _take_room(self.fd, size, self.path)
            found = mmap.mmap(self.fd, size)
            if initialise(memoryview(found)):
                return found
        if _has_members(self.fd):
            raise ConfigError(
                f"{KEY}: {self.path} holds the blocks of another model, layout or size; stop what"
                " uses it"
            )
        os.ftruncate(self.fd, 0)
        _take_room(self.fd, size, self.path)
        new = mmap.mmap(self.fd, size)
        is_made = initialise(memoryview(new))
        assert is_made, "zeros are nobody's"
        return new

    def _join(self) -> int:
        for member in range(MAX_MEMBERS):
            if _try_lock(self.fd, _FIRST_MEMBER + member):
                return member
        raise ConfigError(f"{KEY}: {MAX_MEMBERS} workers of this machine share {self.path} already")

    @property
    def place(self) -> str:
        """Equal for those who map this file, on whatever machine they are, and for nobody else."""
        found = os.fstat(self.fd)
        return f"{_BOOT_ID.read_text().strip()}/{found.st_dev}/{found.st_ino}"

    @contextmanager
    def locked(self, byte: int, wait_s: float) -> Iterator[None]:
        """Holds a lock. Raises BusyError if another process has it for longer than `wait_s`."""
        until_s = time.monotonic() + wait_s
        while not _try_lock(self.fd, byte):
            if time.monotonic() >= until_s:
                raise BusyError(f"byte {byte} of {self.path}")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            _unlock(self.fd, byte)

    @contextmanager
    def dead(self, member: int) -> Iterator[bool]:
        """Whether a member's process is gone; if so, nobody takes its number meanwhile."""
        is_dead = member != self.member and _try_lock(self.fd, _FIRST_MEMBER + member)
        try:
            yield is_dead
        finally:
            if is_dead:
                _unlock(self.fd, _FIRST_MEMBER + member)

    def leave(self) -> None:
        """Stops being a member; the last one removes the file. Idempotent.

        The file stays mapped and open, for what is under way while the process ends. Raises
        BusyError if another process comes or goes and does not get on.
        """
        if self._has_left:
            return
        self._has_left = True
        with self.locked(_LIFE, _LEAVE_WAIT_S):
            _unlock(self.fd, _FIRST_MEMBER + self.member)
            if not _is_wanted(self.fd) and _is_at(self.fd, self.path):
                self.path.unlink()

    def close(self) -> None:
        """Leaves, and closes the file; only the mapping stays. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(BusyError):
                self.leave()
            os.close(self.fd)


def name_for(block_key: bytes) -> str:
    """Of the arena of all workers that hash with this key; others would find nothing in it."""
    return hashlib.blake2b(block_key, digest_size=8, person=b"host arena").hexdigest()


@contextmanager
def _opened(name: str) -> Iterator[tuple[Path, int] | None]:
    """The file's path and descriptor; None if there is none, or it is another user's."""
    path = FOLDER / f"{PREFIX}{name}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield (path, fd) if _is_private(fd) else None
    finally:
        os.close(fd)


@contextmanager
def claimed(name: str) -> Iterator[None]:
    """Keeps the file, if there is one, for this process, which joins it within the context."""
    with _opened(name) as found:
        if found is not None:
            _set_lock(found[1], _CLAIM, fcntl.F_RDLCK)
        yield


def remove_if_unused(name: str) -> bool:
    """Removes the file if no process uses or claims it; False if one does, or it is another's."""
    with _opened(name) as found:
        if found is None:
            return False
        path, fd = found
        # Whoever creates or joins it holds LIFE, and looks afterwards whether it still exists.
        is_unused = _try_lock(fd, _LIFE) and not _is_wanted(fd) and _is_at(fd, path)
        if is_unused:
            path.unlink()
        return is_unused


def remove(name: str) -> None:
    """Takes the file's name away, if it is ours; its memory goes with the last process in it."""
    with _opened(name) as found:
        if found is not None:
            found[0].unlink(missing_ok=True)


class UnusedFiles:
    """Finds files that nobody has used for long, and removes them.

    Processes that were killed may come back, and go on with what they had stored.
    """

    def __init__(self, keep: str) -> None:
        """keep: the name of a file that is not removed."""
        self._keep = keep
        self._since_s: dict[str, float] = {}  # name -> when it was first seen without a process

    def remove(self, now_s: float) -> list[str]:
        """Looks once; returns the names of what it removed."""
        unused = [name for name in _names() if name != self._keep and not _is_used(name)]
        self._since_s = {name: self._since_s.get(name, now_s) for name in unused}
        due = [name for name, since_s in self._since_s.items() if now_s - since_s >= UNUSED_S]
        return [name for name in due if remove_if_unused(name)]


def _names() -> list[str]:
    return sorted(path.name.removeprefix(PREFIX) for path in FOLDER.glob(f"{PREFIX}*"))


def _is_used(name: str) -> bool:
    try:
        fd = os.open(FOLDER / f"{PREFIX}{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # another user's, or gone
    try:
        return _is_wanted(fd) or not _is_private(fd)
    finally:
        os.close(fd)


def _open_locked(path: Path, wait_s: float) -> int:
    """The file, opened or created, with LIFE held, while it has this name.

    wait_s: so long another process may take that creates it. Raises ConfigError.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{KEY}: {path} cannot be opened: {error.strerror}") from error
        if not _is_private(fd):
            os.close(fd)
            raise ConfigError(
                f"{KEY}: other users can read or change {path}, or made it; remove it"
            )
        while not _try_lock(fd, _LIFE):
            if time.monotonic() >= until_s:
                os.close(fd)
                raise ConfigError(f"{KEY}: a process that opens {path} does not get on; stop it")
            time.sleep(1e-3)
        if _is_at(fd, path):
            return fd
        os.close(fd)  # removed meanwhile


def _take_room(fd: int, size: int, path: Path) -> None:
    """Takes the memory now, where too little is an error; touching it later would be a SIGBUS.

    If there is too little, files go that no process uses any more.
    """
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            space = os.statvfs(FOLDER)
            if size > space.f_blocks * space.f_frsize:
                raise
            for name in _names():
                if FOLDER / f"{PREFIX}{name}" != path:
                    remove_if_unused(name)
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if not _has_members(fd):
            path.unlink()
        raise ConfigError(
            f"{KEY}: {FOLDER} has no room for {size / 2**30:.2f} GiB ({error.strerror}); lower the"
            " key, or make shared memory larger (docker: --shm-size, Kubernetes: an emptyDir of"
            " medium Memory)"
        ) from error


def _is_private(fd: int) -> bool:
    """Whether this user made the file, and nobody else can open it: anyone may use the folder."""
    found = os.fstat(fd)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and stat.S_IMODE(found.st_mode) & 0o077 == 0


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False


def _is_wanted(fd: int) -> bool:
    return _has_members(fd) or _has_locks(fd, _CLAIM, 1)


def _has_members(fd: int) -> bool:
    return _has_locks(fd, _FIRST_MEMBER, MAX_MEMBERS)


def _has_locks(fd: int, first: int, num_bytes: int) -> bool:
    """Whether other open files hold locks on any of these bytes."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, num_bytes, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


def _try_lock(fd: int, byte: int) -> bool:
    try:
        _set_lock(fd, byte, fcntl.F_WRLCK)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _unlock(fd: int, byte: int) -> None:
    _set_lock(fd, byte, fcntl.F_UNLCK)


def _set_lock(fd: int, byte: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
