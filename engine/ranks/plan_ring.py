"""A ring of messages in shared memory from one process to several others of the same machine.

The writer puts each message into fixed slots; every reader takes every message, in order. A message
that is larger than a slot spans several, and one that is larger than the ring passes through it in
pieces. A reader looks for the next piece for a short while and then sleeps on its socket until the
writer wakes it, so that an idle ring takes no processor time.

    writer    a cache line: its beats
    reader    a cache line each: number of the last piece that it took, whether it sleeps, its beats
    slot      number of the piece, its length in bytes, whether its message goes on; its bytes

Piece k (counted from 1) is in slot (k - 1) % NUM_SLOTS. The writer overwrites a slot when every
reader has taken what was in it.

**Life.** The memory has no name (memfd): the kernel frees it with the last process that maps it,
however that ended. Readers get it over a Unix socket in the abstract namespace, which leaves no
file either. The socket stays open: it carries wakes to a reader, short reports to the writer, and
its end is the first sign that the process on the other side is dead, whatever it was doing. One
that stands still is not dead: so each side counts beats, at which the other looks (heartbeat.py).
A limit of `stuck_s` is LOOKS waits of a part of it, so that a side which was itself stopped for
long, and goes on, gives the other one time to go on as well.

**Memory order.** The writer stores bytes, then the piece's number; a reader that sees the number
sees the bytes, because x86 lets other processors see stores in their order and loads happen in
theirs (a string copy is complete before the store that follows it). Each number is one aligned
word, stored and loaded whole. A reader that goes to sleep stores its flag and looks once more; the
writer stores the number and looks at the flag. That needs a full fence in both, which x86 has in
the locked instruction that takes a lock. Other processors promise less: there the ring is refused.

Knows nothing of what messages mean, nor of torch.
"""

import mmap
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from engine.errors import ConfigError, WorkerError
from engine.ranks.heartbeat import LOOKS

SLOT_BYTES = 64 * 1024
NUM_SLOTS = 32
SPIN_S = 50e-6  # about as long as a sleeper needs to wake up
LOOK_EVERY_S = 0.2e-3  # at readers, while the ring is full
MAX_REPORT_BYTES = 64 * 1024

_WORD = 8
_LINE = 64  # bytes of a cache line: what one process writes shares none with what another writes
_LINE_WORDS = _LINE // _WORD
_TAKEN, _SLEEPS, _BEATS = 0, 1, 2  # words of a reader's line; the writer's has beats alone
_NUMBER, _LENGTH, _GOES_ON = 0, 1, 2  # words of a slot's line
_HELLO = struct.Struct("<Q")  # a reader's number
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_WAKE = b"w"
_ENDED = select.POLLHUP | select.POLLERR | select.POLLRDHUP
_ANSWER_S = 5.0  # of a process that has just connected


class RingError(WorkerError):
    """The other side of the ring is dead, gone, or has been stuck for too long."""


class _Memory:
    """The shared words and slots; see the module's docstring."""

    def __init__(self, fd: int, num_readers: int) -> None:
        self._map = mmap.mmap(fd, self.size(num_readers))
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")
        self._num_readers = num_readers
        self._fence = threading.Lock()

    @staticmethod
    def size(num_readers: int) -> int:
        return (1 + num_readers) * _LINE + NUM_SLOTS * (_LINE + SLOT_BYTES)

    def reader_line(self, reader: int) -> int:
        """Index of the first word of a reader."""
        return (1 + reader) * _LINE_WORDS

    def slot_line(self, piece: int) -> int:
        """Index of the first word of a piece's slot; its bytes begin a line later."""
        slot_bytes = ((piece - 1) % NUM_SLOTS) * (_LINE + SLOT_BYTES)
        return (1 + self._num_readers) * _LINE_WORDS + slot_bytes // _WORD

    def fence(self) -> None:
        """Every store before is seen by other processors before any load after it is done."""
        with self._fence:
            pass

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        self._map.close()


def _check_processor() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            "workers.tensor_parallel_size: a worker of several ranks needs an x86-64 processor, not"
            f" {platform.machine()}; set it to 1"
        )


class PlanRing:
    """The writing end. Any thread writes, one message after the other; one waits for reports."""

    def __init__(self, name: str, num_readers: int, stuck_s: float) -> None:
        """Opens the ring for `num_readers` readers, which find it by `name` on this machine.

        stuck_s: so long a reader may leave the ring full. Raises ConfigError on a processor of
        another kind than x86-64, OSError if the name is taken.
        """
        _check_processor()
        self.name = name
        self._stuck_s = stuck_s
        self._fd = os.memfd_create("plans", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _Memory.size(num_readers))
        self._memory = _Memory(self._fd, num_readers)
        self._num_written = 0  # pieces
        self._writing = threading.Lock()
        self._readers: dict[int, socket.socket] = {}
        self._num_readers = num_readers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_address(name))
        self._listener.listen(num_readers)
        self._ends = select.poll()
        self._reports = select.poll()

    def accept(self, timeout_s: float) -> int:
        """Waits for a reader to connect; returns its number. Raises RingError when none comes.

        A process of another user, or one that repeats a number, is turned away.
        """
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0.0:
            self._listener.settimeout(left_s)
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                break
            reader = self._greet(sock)
            if reader is not None:
                return reader
            sock.close()
        raise RingError(f"no further rank came within {timeout_s:.0f} s")

    def _greet(self, sock: socket.socket) -> int | None:
        """The number of a reader that may read; it has the memory then."""
        if _peer(sock)[1] != os.getuid():
            return None
        sock.settimeout(_ANSWER_S)
        try:
            reader: int = _HELLO.unpack(sock.recv(_HELLO.size))[0]
            if reader >= self._num_readers or reader in self._readers:
                return None
            socket.send_fds(sock, [_HELLO.pack(self._num_readers)], [self._fd])
        except (OSError, struct.error):
            return None
        sock.setblocking(False)
        self._readers[reader] = sock
        self._ends.register(sock, select.POLLRDHUP)
        self._reports.register(sock, select.POLLIN | select.POLLRDHUP)
        return reader

    def pid(self, reader: int) -> int:
        """The process of a reader, as the kernel tells it."""
        return _peer(self._readers[reader])[0]

    def beat(self) -> None:
        """Show the readers that this process runs; one thread calls it."""
        self._memory.words[_BEATS] += 1

    def beats(self, reader: int) -> int:
        """How often a reader has shown that it runs."""
        return self._memory.words[self._memory.reader_line(reader) + _BEATS]

    def write(self, message: bytes) -> None:
        """Sends a message to every reader; returns when its last piece is in the ring.

        Raises RingError if a reader is dead, or has left the ring full for `stuck_s`.
        """
        view = memoryview(message)
        with self._writing:
            while True:
                self._write_piece(view[:SLOT_BYTES], goes_on=len(view) > SLOT_BYTES)
                view = view[SLOT_BYTES:]
                if not view:
                    return

    def _write_piece(self, data: memoryview, *, goes_on: bool) -> None:
        memory, piece = self._memory, self._num_written + 1
        self._wait_taken(piece - NUM_SLOTS)
        line = memory.slot_line(piece)
        start = line * _WORD + _LINE
        memory.bytes[start : start + len(data)] = data
        memory.words[line + _LENGTH] = len(data)
        memory.words[line + _GOES_ON] = goes_on
        memory.words[line + _NUMBER] = piece  # last: whoever sees it sees the rest
        self._num_written = piece
        memory.fence()
        for reader, sock in self._readers.items():
            if memory.words[memory.reader_line(reader) + _SLEEPS]:
                _send(sock, _WAKE)

    def _wait_taken(self, piece: int) -> None:
        """Until every reader has taken `piece`."""
        if self._all_took(piece):
            return
        for _ in range(LOOKS):
            until_s = time.monotonic() + self._stuck_s / LOOKS
            while time.monotonic() < until_s:
                if self._ends.poll(0):
                    raise RingError("a rank is dead")
                time.sleep(LOOK_EVERY_S)
                if self._all_took(piece):
                    return
        stuck = [r for r in self._readers if self._taken(r) < piece]
        raise RingError(f"reader {stuck} took nothing for {self._stuck_s:.0f} s")

    def _all_took(self, piece: int) -> bool:
        return all(self._taken(reader) >= piece for reader in self._readers)

    def _taken(self, reader: int) -> int:
        return self._memory.words[self._memory.reader_line(reader) + _TAKEN]

    def wait_reports(self, timeout_s: float | None = None) -> list[tuple[int, bytes | None]]:
        """Waits for readers to say something: (reader, its report); None = the reader is dead.

        Returns an empty list after `timeout_s`. A dead reader is told of once.
        """
        ready = self._reports.poll(None if timeout_s is None else 1e3 * timeout_s)
        told: list[tuple[int, bytes | None]] = []
        for fd, _ in ready:
            reader = next(r for r, sock in self._readers.items() if sock.fileno() == fd)
            report = _receive(self._readers[reader])
            if report is None:
                self._reports.unregister(fd)
            told.append((reader, report))
        return told

    def close(self) -> None:
        """Ends the ring; readers get RingError. No other thread may use it any more."""
        self._listener.close()
        for sock in self._readers.values():
            sock.close()
        self._memory.close()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PlanRingReader:
    """One reading end. One thread reads; another may wait for the writer's end."""

    def __init__(self, name: str, reader: int, timeout_s: float, stuck_s: float) -> None:
        """Connects to the ring `name` as its reader of that number, counted from 0.

        stuck_s: so long the rest of a message that has begun may take. Raises RingError if there is
        no such ring, or it does not take this reader within `timeout_s`.
        """
        _check_processor()
        self._stuck_s = stuck_s
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(timeout_s)
        try:
            self._sock.connect(_address(name))
            self._sock.send(_HELLO.pack(reader))
            hello, fds, _, _ = socket.recv_fds(self._sock, _HELLO.size, 1)
        except OSError as error:
            self._sock.close()
            raise RingError(f"the ring {name} cannot be reached: {error}") from error
        if not fds:
            self._sock.close()
            raise RingError(f"the ring {name} does not take reader {reader}")
        self._sock.setblocking(False)
        self._memory = _Memory(fds[0], *_HELLO.unpack(hello))
        os.close(fds[0])
        self._line = self._memory.reader_line(reader)
        self._num_taken = 0  # pieces
        self._wakes = select.poll()
        self._wakes.register(self._sock, select.POLLIN | select.POLLRDHUP)

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Waits for the next message, for ever or for `timeout_s`, after which it returns None.

        Raises RingError when the writer is dead and nothing is left to read, or when it does not
        finish what it began.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._wait_piece(deadline_s):
            return None
        data, goes_on = self._take()
        if not goes_on:
            return data
        pieces = [data]
        while goes_on:
            looks = range(LOOKS)
            if not any(self._wait_piece(time.monotonic() + self._stuck_s / LOOKS) for _ in looks):
                raise RingError(f"the writer left a message unfinished for {self._stuck_s:.0f} s")
            data, goes_on = self._take()
            pieces.append(data)
        return b"".join(pieces)

    def report(self, data: bytes) -> None:
        """Says something to the writer; lost if the writer reads no reports, or is dead."""
        assert len(data) <= MAX_REPORT_BYTES, f"a report of {len(data)} bytes"
        _send(self._sock, data)

    def report_in_turn(self, data: bytes) -> None:
        """`report`, but waits while the writer has too much unread; nothing is lost.

        Raises RingError when the writer is dead, or reads nothing for `stuck_s`.
        """
        assert len(data) <= MAX_REPORT_BYTES, f"a report of {len(data)} bytes"
        room = select.poll()
        room.register(self._sock, select.POLLOUT)
        for _ in range(LOOKS):
            until_s = time.monotonic() + self._stuck_s / LOOKS
            while (left_s := until_s - time.monotonic()) > 0.0:
                try:
                    self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    room.poll(1e3 * left_s)
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise RingError("the writer of the ring is dead") from error
        raise RingError(f"the writer of the ring read nothing for {self._stuck_s:.0f} s")

    def beat(self) -> None:
        """Show the writer that this process runs; one thread calls it."""
        self._memory.words[self._line + _BEATS] += 1

    @property
    def writer_beats(self) -> int:
        """How often the writer has shown that it runs."""
        return self._memory.words[_BEATS]

    @property
    def writer_pid(self) -> int:
        """The process of the writer, as the kernel tells it."""
        return _peer(self._sock)[0]

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Waits until the writer is dead or has closed the ring; False after `timeout_s`.

        May be called by another thread than the one that reads.
        """
        ends = select.poll()
        ends.register(self._sock, select.POLLRDHUP)
        return bool(ends.poll(None if timeout_s is None else 1e3 * timeout_s))

    def close(self) -> None:
        self._sock.close()
        self._memory.close()

    def _has_piece(self) -> bool:
        memory, piece = self._memory, self._num_taken + 1
        return memory.words[memory.slot_line(piece) + _NUMBER] == piece

    def _wait_piece(self, deadline_s: float | None) -> bool:
        """Until the next piece is there; False when the deadline has passed."""
        if self._has_piece():
            return True
        spin_until_s = time.monotonic() + SPIN_S
        while time.monotonic() < spin_until_s:
            if self._has_piece():
                return True
        words, has_ended = self._memory.words, False
        words[self._line + _SLEEPS] = 1
        try:
            while True:
                self._memory.fence()
                if self._has_piece():
                    return True
                if has_ended:
                    raise RingError("the writer of the ring is dead")
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0.0:
                    return False
                has_ended = self._sleep(left_s)
        finally:
            words[self._line + _SLEEPS] = 0

    def _sleep(self, timeout_s: float | None) -> bool:
        """Until the writer wakes this reader; returns whether it has ended."""
        ready = self._wakes.poll(None if timeout_s is None else 1e3 * timeout_s)
        if ready:
            _receive(self._sock)
        return any(events & _ENDED for _, events in ready)

    def _take(self) -> tuple[bytes, bool]:
        """Copies the next piece and gives its slot back; returns it and whether more follows."""
        memory, piece = self._memory, self._num_taken + 1
        line = memory.slot_line(piece)
        start, words = line * _WORD + _LINE, memory.words
        data = bytes(memory.bytes[start : start + words[line + _LENGTH]])
        goes_on = bool(words[line + _GOES_ON])
        self._num_taken = piece
        words[self._line + _TAKEN] = piece  # last: the writer may now overwrite the slot
        return data, goes_on


def _address(name: str) -> str:
    return f"\0laps-ring-{name}"


def _peer(sock: socket.socket) -> Sequence[int]:
    """pid, uid and gid of the process at the other end."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)


def _send(sock: socket.socket, data: bytes) -> None:
    """Never waits: a full socket belongs to a process that has enough to wake it.

    The end of a dead process is noticed where it is waited for.
    """
    with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _receive(sock: socket.socket) -> bytes | None:
    """One packet; empty = there is none; None = the other side is dead and nothing is left."""
    try:
        return sock.recv(MAX_REPORT_BYTES) or None
    except BlockingIOError:
        return b""
    except ConnectionResetError:  # told once, before what that process said last
        return _receive(sock)
