"""TCP connections between processes of a job that carry JSON objects, a line each: how one listens, connects and fails.

The roll call, the watch and the launchers of several hosts use them. JAX's own channels cannot serve: they block or die
with the process that is lost.
"""

import contextlib
import errno
import ipaddress
import json
import os
import select
import selectors
import socket
import time
from typing import Any

from jaxdist.errors import UserError

MAX_LINE = 1 << 20  # bytes; more without an end is noise, while the statuses of some thousand ranks fit
NAME_S = 30.0  # until the name of the host on which to listen must be known to it
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S = 10, 5

JsonObject = dict[str, Any]


class PortTaken(UserError):
    """Another program listens on the port."""


class Connection:
    """One end of a connection. A method waits only if it is given seconds. What cannot be sent yet is kept, and sent by
    the next call.

    `receive` sets `open` to False when the other end has hung up, or has sent a line that is no JSON object or is too
    long.

    Args:
        stream: The connected socket.
        lost_after: Seconds without an answer after which the kernel ends the connection: a machine without power or
            network does not hang up. None: never.
    """

    def __init__(self, stream: socket.socket, lost_after: int | None = None) -> None:
        stream.setblocking(False)
        with contextlib.suppress(OSError):  # the other end has gone already: reading tells
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

    def fileno(self) -> int:
        """The descriptor of the socket: selectors ask for it."""
        return self.stream.fileno()

    def send(self, message: JsonObject) -> None:
        """Send a message. One to a peer that is gone is lost without an error: `receive` closes the connection then."""
        self._unsent += json.dumps(message).encode() + b"\n"
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
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):  # brackets in brackets
                said = None
            if not isinstance(said, dict):
                break
            messages.append(said)
        if len(messages) < len(lines) or len(self._received) > MAX_LINE or not piece:
            self.close()
        return messages

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
    """The open connections of one thread, `all`, which are read together. Where there is a server, those that others
    open to it are added."""

    def __init__(self, server: socket.socket | None = None) -> None:
        self._selector, self._server = selectors.DefaultSelector(), server
        self.all: set[Connection] = set()
        if server is not None:
            self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: Connection) -> None:
        """Read this connection, too."""
        self.all.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def drop(self, connection: Connection) -> None:
        """Hang up."""
        if connection in self.all:
            self.all.discard(connection)
            self._selector.unregister(connection)
        connection.close()

    def poll(self, seconds: float) -> list[tuple[Connection, list[JsonObject]]]:
        """The connections from which something has come within `seconds`, with their messages. One that has ended is
        among them once, and no longer `open`."""
        for connection in self.all:
            connection.flush()
        news: list[tuple[Connection, list[JsonObject]]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):  # it has gone already
                    self.add(Connection(key.fileobj.accept()[0]))  # type: ignore[union-attr]
                continue
            messages = key.data.receive()
            if not key.data.open:
                self.drop(key.data)
            news.append((key.data, messages))
        return news

    def stop_listening(self) -> None:
        """Free the server's port. The connections stay."""
        if self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None

    def close(self) -> None:
        """End all of them, and the server."""
        self.stop_listening()
        for connection in list(self.all):
            self.drop(connection)
        self._selector.close()


def open_connection(host: str, port: int, seconds: float, lost_after: int | None = None) -> Connection:
    """Connect to a server. Raises `OSError`, also for a name that is none."""
    try:
        return Connection(socket.create_connection((host, port), seconds), lost_after)
    except UnicodeError as error:
        raise OSError(str(error)) from error


def listen(host: str, port: int, seconds: float = 0.0, *, everywhere: bool = False) -> socket.socket:
    """A server on one address of this machine, that of `host`. Raises `UserError`, `PortTaken` for a port in use.

    Args:
        host: A name or address of this machine.
        port: 0 for one that the system picks.
        seconds: How long to wait for the name: in Kubernetes it may be known later than the process starts.
        everywhere: Whether `host` may be the unspecified address (0.0.0.0), which is all addresses of a machine.
    """
    where, deadline = format_address(host, port), time.monotonic() + seconds
    mend = (
        "give an address of the host of rank 0; or, if it is reached at another address than its own, set"
        " JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:PORT to its own"
    )
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise UserError(f"coordinator: the host of {where} is not known to rank 0 ({error}); {mend}") from error
            time.sleep(0.5)
    for family, kind, protocol, _, target in found:
        if not everywhere and ipaddress.ip_address(str(target[0]).partition("%")[0]).is_unspecified:
            raise UserError(f"coordinator: {where} is all addresses of a machine; {mend}")
        server = socket.socket(family, kind, protocol)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier attempt may linger
            server.bind(target)
            server.listen(1024)
            server.setblocking(False)
            return server
        except OSError as error:
            server.close()
            if error.errno != errno.EADDRNOTAVAIL:
                reason = os.strerror(error.errno or 0)
                kind_of = PortTaken if error.errno == errno.EADDRINUSE else UserError
                raise kind_of(
                    f"coordinator: {where}: port {port}: {reason}; set a free one (MASTER_PORT or"
                    " JAX_COORDINATOR_ADDRESS), or is another process rank 0 too?"
                ) from error
    shown = ", ".join(sorted({str(entry[4][0]) for entry in found}))
    raise UserError(f"coordinator: {where} ({shown}) is no address of this machine, on which rank 0 runs; {mend}")


def format_address(host: str, port: int) -> str:
    """ "host:port", with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[IPv6 address]:port". Raises `UserError`."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536) or not host.strip("[]"):
        raise UserError(f"coordinator: {address!r} in the environment is no address; allowed: host:port of rank 0")
    return host.removeprefix("[").removesuffix("]"), int(port)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_problem(port: int) -> str | None:
    """Why a coordinator could not listen on this port here, or None."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return f"port {port}: {os.strerror(error.errno or 0)}"
    return None


def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname()


def host_address() -> str | None:
    """The address that this machine's own name leads to, or None where it leads to none."""
    try:
        return socket.gethostbyname(host_name())
    except OSError:
        return None


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches `host`. Raises `OSError` where there is no way."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # UDP: chooses a route, and sends nothing
        return str(probe.getsockname()[0])
