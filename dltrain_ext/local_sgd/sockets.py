"""The TCP connections of this process, and how much unsent data they may hold."""

import contextlib
import os
import socket
import stat

# Of Linux; on other systems nothing is changed.
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT
_FOLDER = "/proc/self/fd"


def sockets() -> set[tuple[int, int]]:
    """Returns the descriptor and the inode of each socket of this process."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_FOLDER):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.stat(f"{_FOLDER}/{name}")
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def limit_unsent(descriptors: set[tuple[int, int]], nbytes: int) -> None:
    """Keeps connections from taking more than that many bytes that they cannot send yet.

    Otherwise a connection holds megabytes on a slow link, which other messages wait for, and so does the news that its
    process has been killed, since the system first sends what it holds.
    """
    for descriptor, _ in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, nbytes)
