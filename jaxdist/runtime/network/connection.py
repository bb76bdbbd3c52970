"""TCP connections between processes of a job that carry JSON objects, a line each: how one listens, connects and fails.

The roll call, the watch and the launchers of several hosts use them. JAX's own channels cannot serve: they block or die
with the process that is lost.
"""

import contextlib
import errno
import hmac
import ipaddress
import os
import resource
import select
import selectors
import socket
import time
from collections.abc import Generator
from typing import Any

from jaxdist.errors import UserError
from jaxdist.runtime.network.addresses import format_address
from jaxdist.runtime.network.handshake import SAME_TOKEN, SAME_VERSION, Door, Foreign, Stranger, call, listen_to
from jaxdist.runtime.network.job_token import MAKE, TOKEN
from jaxdist.runtime.network.messages import JsonObject, has_shape, read_line, write_line

MAX_LINE = 1 << 20  # bytes; more without an end is noise, while the statuses of some thousand ranks fit
STRANGER_LINE = 1 << 10  # of somebody who is not known yet
STRANGERS, STRANGER_S, YOUNG_S = 128, 10.0, 0.5  # at once; for how long one may stay; and before it may give way
ACCEPTS = 64  # connections taken in at once, before those that are known are heard again
FULL_S = 0.05  # where the system has no descriptor left for another connection
TOLD_S = 60.0  # between two lines about strangers
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S = 10, 5
MAC = 32  # characters before a message


class Connection:
    """One end of a connection. A method waits only if it is given seconds. What cannot be sent yet is kept, and sent by
    the next call.

    `receive` sets `open` to False when the other end has hung up, or has sent what is no message or is too long.

    Args:
        stream: The connected socket.
        lost_after: Seconds without an answer after which the kernel ends the connection: a machine without power or
            network does not hang up. None: never.
    """

    def __init__(self, stream: socket.socket, lost_after: int | None = None) -> None:
        stream.setblocking(False)
        self.where = "an address that is gone"
        self.fault = ""  # what the other end has done wrong
        with contextlib.suppress(OSError):  # the other end has gone already: reading tells
            if isinstance(peer := stream.getpeername(), tuple):
                self.where = format_address(*peer[:2])
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if lost_after is not None:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in (
                    (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
                    (socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S),
                    (socket.TCP_KEEPCNT, (lost_after - KEEPALIVE_IDLE_S) // KEEPALIVE_EVERY_S),
                    (socket.TCP_USER_TIMEOUT, 1000 * lost_after),
                ):
                    stream.setsockopt(socket.IPPROTO_TCP, option, value)
        self.stream, self.open, self.born = stream, True, time.monotonic()
        self._received, self._unsent = b"", b""
        self._door: Door | None = None  # once both ends know each other
        self._keys, self._counts = (b"", b""), [0, 0]  # of messages sent and received

    def admit(self, door: Door, own: bytes, other: bytes) -> None:
        """From now on messages are signed, and those that come must be of the channel's shapes. own, other: the keys of
        what this end and the other one send."""
        self._door, self._keys = door, (own, other)

    def fileno(self) -> int:
        """The descriptor of the socket: selectors ask for it."""
        return self.stream.fileno()

    def _mac(self, way: int, line: bytes) -> bytes:
        """The signature of the next message in a direction. Its number is in it, so that none can be left out."""
        self._counts[way] += 1
        signed = self._counts[way].to_bytes(8) + line
        return hmac.digest(self._keys[way], signed, "sha256").hex()[:MAC].encode()

    def send(self, message: JsonObject) -> None:
        """Send a message. One to a peer that is gone is lost without an error: `receive` closes the connection then."""
        line = write_line(message)
        self._unsent += (self._mac(0, line) if self._door else b"") + line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of what is kept as the system takes."""
        try:
            sent = self.stream.send(self._unsent) if self._unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # the other end has gone: nothing of it will ever be sent
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]

    def receive(self, seconds: float = 0.0) -> list[JsonObject]:
        """The messages that have come, up to the first line that is no message. Waits at most `seconds` for a first
        one."""
        if not self.open:
            return []
        self.flush()
        if seconds > 0:
            self._wait_for(select.POLLIN, seconds)
        try:
            piece = self.stream.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:  # a host that vanished is no ConnectionError: ETIMEDOUT, EHOSTUNREACH
            piece = b""
        *lines, self._received = (self._received + piece).split(b"\n")
        messages: list[JsonObject] = []
        for line in lines:
            said = self._read(line)
            if said is None:
                break
            messages.append(said)
        too_long = len(self._received) > (MAX_LINE if self._door else STRANGER_LINE)
        if len(messages) < len(lines) or too_long:
            self.fault = "it has sent what is no message of jaxdist's"
            if self._door:
                tell(f"{self._door.channel}: {self.where} is hung up on: {self.fault}; {SAME_VERSION}")
        if self.fault or not piece:
            self.close()
        return messages

    def _read(self, line: bytes) -> JsonObject | None:
        """The message in a line, or None."""
        if self._door is None:
            return read_line(line)
        if not hmac.compare_digest(line[:MAC], self._mac(1, line[MAC:])):
            return None
        said = read_line(line[MAC:])
        return said if said is not None and has_shape(said, self._door.shapes) else None

    def close(self, seconds: float = 0.0) -> None:
        """Send the rest, for at most `seconds`, then hang up."""
        deadline = time.monotonic() + seconds
        while self.open and self._unsent and time.monotonic() < deadline:
            self._wait_for(select.POLLOUT, 0.05)
            self.flush()
        self.open = False
        self.stream.close()

    def _wait_for(self, event: int, seconds: float) -> None:
        poll = select.poll()  # `select.select` refuses descriptors above 1023
        poll.register(self.stream, event)
        poll.poll(1000 * seconds)


class Connections:
    """The open connections of one thread to others who know the token, `all`, which are read together.

    Where there is a server, those that others open to it are added, once they have shown that they know the token.
    Until then they are strangers: these are few at a time, each for a short time, and hung up on where the system has
    no descriptors left. One line a minute says so.

    Args:
        server: A socket that listens, or None.
        door: What callers of the server must know.
        lost_after: As of `Connection`, for those that call.
    """

    def __init__(
        self, server: socket.socket | None = None, door: Door | None = None, lost_after: int | None = None
    ) -> None:
        if server is not None:
            assert door is not None
            check_token(server.getsockname()[0], door)
            self._door = door
        self._selector, self._server, self._lost_after = selectors.DefaultSelector(), server, lost_after
        self.all: set[Connection] = set()
        self._strangers: dict[Connection, Generator[JsonObject, JsonObject, Any]] = {}  # as they came
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # a quarter: the process itself needs some
        self._most = STRANGERS if limit == resource.RLIM_INFINITY else max(1, min(STRANGERS, limit // 4))
        self._told = -TOLD_S
        if server is not None:
            self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: Connection) -> None:
        """Read this connection, too."""
        self.all.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def drop(self, connection: Connection) -> None:
        """Hang up."""
        if connection in self.all or connection in self._strangers:
            self.all.discard(connection)
            self._strangers.pop(connection, None)
            self._selector.unregister(connection)
        connection.close()

    def poll(self, seconds: float) -> list[tuple[Connection, list[JsonObject]]]:
        """The known connections from which something has come within `seconds`, with their messages. One that has ended
        is among them once, and no longer `open`."""
        for connection in self.all:
            connection.flush()
        news: list[tuple[Connection, list[JsonObject]]] = []
        for key, _ in self._selector.select(min(seconds, YOUNG_S) if self._strangers else seconds):
            connection = key.data
            if connection is None:
                self._accept()
            elif connection in self._strangers:
                self._meet(connection)
            elif connection in self.all:
                messages = connection.receive()
                if not connection.open:
                    self.drop(connection)
                news.append((connection, messages))
        for stranger in list(self._strangers):
            if time.monotonic() - stranger.born > STRANGER_S:
                self._dismiss(stranger, f"it has not said who it is in {STRANGER_S:g} s")
        return news

    def _accept(self) -> None:
        """Take in who has called, as strangers. Where there are too many of them the oldest goes, unless it has just
        come: the others wait outside then."""
        assert self._server is not None
        for _ in range(ACCEPTS):
            oldest = next(iter(self._strangers), None)
            if oldest is not None and len(self._strangers) >= self._most:
                if time.monotonic() - oldest.born < YOUNG_S:
                    time.sleep(FULL_S)
                    return
                self._dismiss(oldest, f"there are {self._most} that have not said who they are")
            try:
                stranger = Connection(self._server.accept()[0], self._lost_after)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # it has gone already
                if oldest is None:
                    time.sleep(FULL_S)
                    return
                self._dismiss(oldest, f"{os.strerror(error.errno)} for others that call")
                continue
            self._strangers[stranger] = listen_to(self._door)
            next(self._strangers[stranger])
            self._selector.register(stranger, selectors.EVENT_READ, stranger)

    def _meet(self, stranger: Connection) -> None:
        """Hear a stranger, who may show now that it is none."""
        messages = stranger.receive()
        try:
            if len(messages) > 1:
                raise Stranger("it is not jaxdist's")
            for said in messages:
                stranger.send(self._strangers[stranger].send(said))
        except StopIteration as done:
            answer, keys = done.value
            stranger.send(answer)
            stranger.admit(self._door, keys.listener, keys.caller)
            del self._strangers[stranger]
            self.all.add(stranger)
        except Stranger as error:
            if error.answer:
                stranger.send(error.answer)
            self._dismiss(stranger, str(error))
        if stranger.fault:
            self._dismiss(stranger, stranger.fault)
        elif not stranger.open:
            self.drop(stranger)

    def _dismiss(self, stranger: Connection, why: str) -> None:
        """Hang up on a stranger, and say so where nothing was said for a while."""
        self.drop(stranger)
        if time.monotonic() > self._told + TOLD_S:
            self._told = time.monotonic()
            tell(f"{self._door.channel}: {stranger.where} has called and is hung up on: {why}")

    def stop_listening(self) -> None:
        """Free the server's port. The connections stay."""
        if self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None

    def close(self, seconds: float = 0.0) -> None:
        """End all of them, and the server. seconds: in which each must have sent its last message."""
        self.stop_listening()
        for connection in [*self.all, *self._strangers]:
            connection.close(seconds)
        self._selector.close()


def tell(*lines: str) -> None:
    """Write lines to standard error in one piece, past Python's buffers, which another thread may have locked."""
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(2, ("\n".join(lines) + "\n").encode(errors="backslashreplace"))


def check_token(host: str, door: Door) -> None:
    """Raise `UserError` where others than this machine's programs reach an address, and there is no token."""
    if not door.token and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise UserError(
            f"{door.channel}: {host} can be reached by other machines, and the job has no token; {SAME_TOKEN}; make"
            f" one, once, by: {MAKE}, and export {TOKEN}=... on every host"
        )


def reach(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to any server. Raises `OSError`, also for a name that is none."""
    try:
        return socket.create_connection((host, port), seconds)
    except UnicodeError as error:
        raise OSError(str(error)) from error


def open_connection(host: str, port: int, seconds: float, door: Door, lost_after: int | None = None) -> Connection:
    """Connect to a server of jaxdist that has the same token. Raises `OSError` where there is none within `seconds`,
    `UserError` where it has another token or version, or where a token is needed."""
    deadline, where = time.monotonic() + seconds, format_address(host, port)
    if not door.token:
        with contextlib.suppress(socket.gaierror, UnicodeError):  # `reach` says it
            for *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                check_token(str(target[0]), door)
    connection, calling = Connection(reach(host, port, seconds), lost_after), call(door, where)
    try:
        connection.send(next(calling))
        while connection.open:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Foreign(f"what answers at {where} has not said in {seconds:g} s who it is")
            for said in connection.receive(left)[:1]:
                connection.send(calling.send(said))
        raise Foreign(f"what answers at {where} is not jaxdist's {door.channel}")
    except StopIteration as done:
        connection.admit(door, done.value.caller, done.value.listener)
        return connection
    except BaseException:
        connection.close()
        raise
