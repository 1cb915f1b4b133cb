"""What this process has sent over TCP, by the kernel's own account: the bytes that a backend puts on the wire."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

# Of two 64-bit numbers in Linux's struct tcp_info (include/uapi/linux/tcp.h), since Linux 4.19: tcpi_bytes_sent, and
# tcpi_bytes_retrans, which the first includes.
_OFFSET, _SIZE = 200, 216


def sent_over_tcp() -> int | None:
    """See `course_utils.traffic.wire_bytes`."""
    if not sys.platform.startswith("linux") or not os.path.isdir("/proc/self/fd"):
        return None
    sockets: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since it was listed
            continue
        if stat.S_ISSOCK(status.st_mode):
            sockets[status.st_ino] = int(name)  # one of its descriptors
    sent = [_sent(descriptor) for descriptor in sockets.values()]
    return None if None in sent else sum(sent)


def _sent(descriptor: int) -> int | None:
    """Of one socket, 0 if it is no TCP connection; None if this kernel does not say."""
    try:
        copy, blocking = os.dup(descriptor), os.get_blocking(descriptor)
    except OSError:
        return 0
    with socket.socket(fileno=copy) as connection:
        os.set_blocking(descriptor, blocking)  # Python may just have changed it, for all who have this socket
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if not is_tcp:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(info) < _SIZE:
        return None
    sent, again = struct.unpack_from("=QQ", info, _OFFSET)
    return sent - again
