"""Copies of the app's connections, and the reply that each gets when the app is killed.

The app gives the launcher, over a channel of their own, a copy of every connection on which a model was
asked for, and keeps a byte of state for each in a file of shared memory that outlives it: an index into
the replies it left beforehand. The launcher knows no HTTP; when the app is gone it writes the reply and
closes.

On the channel a message is the number of the connection's descriptor in the app: with a descriptor the
copy to keep, without one the copy to close. Standard library only, and of that what is cheap: the
launcher imports this.
"""

from __future__ import annotations

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_BYTES = 4
_NOW = _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL


class Copies:
    """The app's end. Nothing here waits or fails."""

    def __init__(self, channel: _socket.socket, states_fd: int) -> None:
        self._channel, self._states_fd = channel, states_fd

    def hold(self, number: int) -> None:
        """Have the launcher keep a copy of this descriptor until `drop`."""
        raw = number.to_bytes(_BYTES, "little")
        self._send(raw, [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, raw)])

    def mark(self, number: int, state: int) -> None:
        """Note the connection's state from now on: a write of one byte, under a microsecond."""
        os.pwrite(self._states_fd, bytes((state,)), number)

    def drop(self, number: int) -> None:
        """Close the copy: only then, or after a shutdown, does the client see the end."""
        self._send(number.to_bytes(_BYTES, "little"), [])

    def _send(self, raw: bytes, rights: list[tuple[int, int, bytes]]) -> None:
        try:  # noqa: SIM105  contextlib costs the launcher 3 ms
            self._channel.sendmsg([raw], rights, _NOW)
        except OSError:
            pass


class Kept:
    """The launcher's end: `fds` are the channel and the states.

    `replies` are indexed by state; an empty one only closes the connection.
    """

    def __init__(self, fds: Sequence[int], replies: Sequence[bytes]) -> None:
        channel_fd, self._states_fd = fds
        self._channel = _socket.socket(fileno=channel_fd)
        self._replies = replies
        self._copies: dict[bytes, _socket.socket] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def fileno(self) -> int:
        """The channel's descriptor, to be polled."""
        return self._channel.fileno()

    def receive(self) -> bool:
        """Read what the app has sent. False at its end."""
        while True:
            try:
                number, control, _, _ = self._channel.recvmsg(
                    _BYTES, _socket.CMSG_SPACE(_BYTES), _socket.MSG_DONTWAIT | _socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not number:
                return False
            old = self._copies.pop(number, None)
            if old is not None:
                old.close()
            for _, _, data in control:
                self._copies[number] = _socket.socket(fileno=int.from_bytes(data[:_BYTES], "little"))

    def send_replies(self) -> None:
        """Send every connection its reply after the app's end, and close everything."""
        self.receive()
        for number, copy in self._copies.items():
            state = os.pread(self._states_fd, 1, int.from_bytes(number, "little"))
            reply = self._replies[state[0]] if state and state[0] < len(self._replies) else b""
            try:
                if reply:
                    copy.send(reply, _NOW)
                copy.shutdown(_socket.SHUT_WR)
                # what was left unread would make the close a reset, which takes the reply back
                copy.recv(1 << 16, _NOW)
            except OSError:
                pass  # the client left, or has not read for so long that nothing more fits
            copy.close()
        self._copies.clear()
        self._channel.close()
        os.close(self._states_fd)
