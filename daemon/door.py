"""The socket of the daemon as a file: who may bind it, who may speak to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from tierd.daemon.errors import AlreadyRunning, PermissionDenied
from tierd.daemon.paths import check_socket_path, make_private_dir

BACKLOG = 2048
_PROBE_TIMEOUT_S = 1.0
_PEER = struct.Struct("3i")  # pid, uid, gid


class Door:
    """A listening unix socket with the lock that makes it the only one.

    The lock is a flock on a file beside the socket: it dies with its process, so a daemon that was killed leaves
    nothing that stops the next one. The socket file alone proves nothing: it stays behind.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock and listen. Raises AlreadyRunning, PermissionDenied, BadConfig."""
        self.path = check_socket_path(path)
        make_private_dir(path.parent)
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock_fd = _lock(self._lock_path, path)
        try:
            self.socket = self._bind()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        """Remove the socket, then let the lock go. The order keeps a successor's socket safe."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self.socket.close()
        os.close(self._lock_fd)

    def restore(self) -> bool:
        """Listen anew, at a new `socket`, if the socket file is gone; True if that was so.

        Another file in its place is left alone: it is somebody's. Raises as the constructor does, AlreadyRunning when
        the lock file went as well and another daemon took its place.
        """
        with contextlib.suppress(FileNotFoundError):
            os.lstat(self.path)
            return False
        make_private_dir(self.path.parent)
        if not self._holds_lock():
            # A lock on a file without a name keeps nobody out.
            fd = _lock(self._lock_path, self.path)
            os.close(self._lock_fd)
            self._lock_fd = fd
        old, self.socket = self.socket, self._bind()
        old.close()
        return True

    def _holds_lock(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self._lock_path), os.fstat(self._lock_fd))
        return False

    def _bind(self) -> socket.socket:
        if _answers(self.path):
            # Somebody listens without our lock: another kind of program, or a lock file that was deleted.
            raise AlreadyRunning(f"something else listens at {self.path}", hint="choose another socket with --socket")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # stale: the lock is ours and nobody answers
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        mask = os.umask(0o177)  # the file is born 0600, there is no moment in which others could connect
        try:
            sock.bind(str(self.path))
            sock.listen(BACKLOG)
        except OSError as exc:
            sock.close()
            hint = "choose another socket with --socket"
            raise PermissionDenied(f"cannot listen at {self.path}: {exc.strerror}", hint=hint) from exc
        finally:
            os.umask(mask)
        self._inode = os.lstat(self.path).st_ino
        return sock


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    return int(_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _lock(path: Path, socket_path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise PermissionDenied(f"cannot open the lock {path}: {exc.strerror}", hint="check its owner and mode") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise AlreadyRunning(
            f"a daemon (pid {owner or 'unknown'}) already serves {socket_path}", hint="`tierd stop` ends it"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _answers(path: Path) -> bool:
    """Whether somebody accepts connections at the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # its backlog is full: it listens
        except OSError:
            return False
    return True
