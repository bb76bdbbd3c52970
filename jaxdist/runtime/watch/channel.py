"""Connections between the processes of a job outside of JAX: JSON lines over TCP, a star around rank 0.

JAX's own channels die or block with the process that is lost: collectives wait for it, the coordination service ends
everybody. A plain connection tells at once when the process at its other end is gone. Rank 0 listens on the one address
under which it reaches the coordinator, on a port that the system picks; port and token go through the coordinator's
store. Who does not know the token is disconnected.
"""

import contextlib
import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import time
from typing import Any

from jaxdist.errors import UserError
from jaxdist.processes import Place, job_state

KEY = "jaxdist/channel"
CONNECT_S = 60.0  # until a process that has joined must be connected
HELLO_S = 5.0  # until a connection must have said whose it is
LINE_BYTES = 1 << 20  # more without an end is no line of ours

Message = dict[str, Any]


class Link:
    """One connection, never waited for: what cannot be sent yet is kept."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream, self.born = stream, time.monotonic()
        self._read, self._unsent = b"", b""

    def send(self, message: Message) -> None:
        """Hand in a message. One to a peer that is gone is lost; reading tells so."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the system takes."""
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.stream.send(self._unsent) :] if self._unsent else b""

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have come, and whether the connection is still there."""
        try:
            piece = self.stream.recv(1 << 16)
        except BlockingIOError:
            return [], True
        except OSError:  # a host that vanished is no ConnectionError: ETIMEDOUT, EHOSTUNREACH
            return [], False
        *lines, self._read = (self._read + piece).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # brackets in brackets
            return [], False
        good = all(isinstance(each, dict) for each in messages) and len(self._read) <= LINE_BYTES
        return (messages, bool(piece)) if good else ([], False)


class Channel:
    """The connections of this process, by rank: rank 0 has one to each other rank, the others one to rank 0. For one
    thread's use."""

    def __init__(self, here: Place) -> None:
        self.here = here
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._strangers: set[Link] = set()
        job = job_state()
        # The same number on all processes: a job may train more than once, and no key can be set twice.
        key = f"{KEY}/{job.client.key_value_increment(f'{KEY}/runs/{here.rank}', 1)}"
        if here.rank == 0:
            self._token = secrets.token_hex(16)
            self._listener = listen(job.coordinator_address)
            host, port = self._listener.getsockname()[:2]
            self._selector.register(self._listener, selectors.EVENT_READ)
            job.client.key_value_set(key, json.dumps([host, port, self._token]))
        else:
            host, port, token = json.loads(job.client.blocking_key_value_get(key, int(CONNECT_S * 1000)))
            if ipaddress.ip_address(host).is_unspecified:  # it listens everywhere, as the coordinator was told to
                host = split_address(job.coordinator_address)[0]
            self._take(0, Link(connect(host, port, here.rank)))
            self._links[0].send({"hello": here.rank, "token": token})

    @property
    def connected(self) -> set[int]:
        """The ranks at the other ends."""
        return set(self._links)

    def send(self, rank: int, message: Message) -> None:
        """To one rank; nothing where it is not connected."""
        if rank in self._links:
            self._links[rank].send(message)

    def broadcast(self, message: Message) -> None:
        """To everybody at the other ends."""
        for link in self._links.values():
            link.send(message)

    def poll(self, seconds: float) -> list[tuple[int, Message | None]]:
        """What has come by then, as (rank, message); (rank, None) when a connection has ended."""
        news: list[tuple[int, Message | None]] = []
        for link in self._links.values():
            link.flush()
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
                continue
            link = key.data
            messages, alive = link.receive()
            if link in self._strangers:
                messages = self._introduced(link, messages)
            rank = next((rank for rank, known in self._links.items() if known is link), None)
            if rank is not None:
                news += [(rank, message) for message in messages]
            if not alive:
                self._drop(link)
                news += [(rank, None)] if rank is not None else []
        for link in [each for each in self._strangers if time.monotonic() - each.born > HELLO_S]:
            self._drop(link)
        return news

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have gone again
            link = Link(self._listener.accept()[0])
            self._strangers.add(link)
            self._selector.register(link.stream, selectors.EVENT_READ, link)

    def _introduced(self, link: Link, messages: list[Message]) -> list[Message]:
        """What comes after a good hello. A bad one ends the connection."""
        if not messages:
            return []
        rank, token = messages[0].get("hello"), str(messages[0].get("token"))
        if not isinstance(rank, int) or not 0 < rank < self.here.processes or rank in self._links:
            rank = None
        if rank is None or not hmac.compare_digest(token.encode(), self._token.encode()):
            self._drop(link)
            return []
        self._strangers.discard(link)
        self._links[rank] = link
        return messages[1:]

    def _take(self, rank: int, link: Link) -> None:
        self._links[rank] = link
        self._selector.register(link.stream, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.stream)
        link.stream.close()
        self._strangers.discard(link)
        self._links = {rank: known for rank, known in self._links.items() if known is not link}

    def close(self) -> None:
        """End all connections."""
        for link in [*self._links.values(), *self._strangers]:
            self._drop(link)
        if self.here.rank == 0:
            self._listener.close()
        self._selector.close()


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port"."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def listen(coordinator: str) -> socket.socket:
    """A listening socket on the host of "host:port", or, where that is no address of this machine but leads to it, on
    the one that this machine reaches it from."""
    family, _, _, _, address = socket.getaddrinfo(*split_address(coordinator), type=socket.SOCK_DGRAM)[0]
    with contextlib.suppress(OSError):
        return socket.create_server((address[0], 0), family=family, backlog=1024)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(address)
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family, backlog=1024)


def connect(host: str, port: int, rank: int) -> socket.socket:
    """A connection to rank 0. Raises `UserError` where there is no way."""
    try:
        return socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise UserError(
            f"watch: rank {rank} cannot connect to rank 0 at {host}:{port} ({error.strerror or error}); allow "
            "connections between the hosts of the job, on ports that the system picks"
        ) from error
