"""A file that shares a secret between processes of one user, in a directory that other users can write to."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_BYTES = 4096  # of the file


class PrivateFile:
    """A small file that only this user can read, in a directory that only this user can open.

    Another user may have made the directory, or a link in its place, beforehand: a file or directory that other users can
    access is refused, and no link is followed.

    Args:
        directory: Directory of the file, made if it does not exist; its parent has to exist.
        name: Name of the file.

    Raises:
        OSError: if the directory cannot be made, or is open to others.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
        with self._opened_directory():
            pass

    def write(self, content: bytes) -> None:
        """Replace the file atomically.

        Raises:
            OSError: if it cannot be written, or the directory is open to others.
        """
        partial = f"{self.path.name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._opened_directory() as directory:
            try:
                with os.fdopen(os.open(partial, flags, 0o600, dir_fd=directory), "wb") as file:
                    file.write(content)
                os.rename(partial, self.path.name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=directory)
                raise

    def read(self) -> bytes | None:
        """The content; None if there is no file.

        Raises:
            OSError: if it cannot be read, or the file or its directory is open to others.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._opened_directory() as directory:
            try:
                descriptor = os.open(self.path.name, flags, dir_fd=directory)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as file:
                require_private(descriptor)
                return file.read(_MOST_BYTES)

    def remove(self) -> None:
        """Remove the file if it exists.

        Raises:
            OSError: if it cannot be removed, or the directory is open to others.
        """
        with self._opened_directory() as directory, contextlib.suppress(FileNotFoundError):
            os.unlink(self.path.name, dir_fd=directory)

    @contextlib.contextmanager
    def _opened_directory(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path.parent, flags)
        try:
            require_private(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


def require_private(descriptor: int) -> None:
    """Check that other users have no access to a file or directory.

    Raises:
        OSError: if they have, or it is neither a regular file nor a directory.
    """
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to another user, number {status.st_uid}")
    if status.st_mode & 0o077:
        raise OSError(errno.EPERM, f"other users may use it: its mode is {stat.S_IMODE(status.st_mode):o}")
