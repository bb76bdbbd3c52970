"""Messages between the processes of a job outside of JAX: a star of connections around rank 0.

JAX's own channels die or block with the process that is lost: collectives wait for it, the coordination service ends
everybody. A plain connection tells at once when the process at its other end is gone. Rank 0 listens on the one address
under which it reaches the coordinator, on a port that the system picks. Address, port and a token go through the job's
key-value store, and whoever does not know the token is disconnected.
"""

import hmac
import ipaddress
import json
import secrets
import socket
import time

from jaxdist.errors import UserError
from jaxdist.processes import JobStore, Place, job_state
from jaxdist.runtime.connection import (
    Connection,
    Connections,
    JsonObject,
    format_address,
    listen,
    local_address_towards,
    open_connection,
    split_address,
)

CONNECT_S = 60.0  # until a process that has joined must be connected
HELLO_S = 5.0  # until a connection must have said which rank it is


class Channel:
    """The connections of this process, by rank: rank 0 has one to each other rank, the others one to rank 0. For one
    thread's use."""

    def __init__(self, here: Place) -> None:
        self.here = here
        self._ranks: dict[int, Connection] = {}
        store, coordinator = JobStore("channel", here.rank), job_state().coordinator_address
        if here.rank == 0:
            self._token = secrets.token_hex(16)
            server = listen_near(coordinator)
            self._connections = Connections(server)
            store.set("rank0", json.dumps([*server.getsockname()[:2], self._token]))
            return
        said = store.get("rank0", CONNECT_S)
        if said is None:
            raise TimeoutError(f"rank 0 has not said within {CONNECT_S:.0f} s where its watch listens")
        host, port, token = json.loads(said)
        if ipaddress.ip_address(host).is_unspecified:  # it listens everywhere, as the coordinator was told to
            host = split_address(coordinator)[0]
        try:
            self._ranks[0] = open_connection(host, port, CONNECT_S)
        except OSError as error:
            raise UserError(
                f"watch: rank {here.rank} cannot connect to rank 0 at {format_address(host, port)}"
                f" ({error.strerror or error}); allow connections between the hosts of the job, on ports that the"
                " system picks"
            ) from error
        self._connections = Connections()
        self._connections.add(self._ranks[0])
        self._ranks[0].send({"hello": here.rank, "token": token})

    @property
    def connected(self) -> set[int]:
        """The ranks at the other ends."""
        return set(self._ranks)

    def send(self, rank: int, message: JsonObject) -> None:
        """Send to one rank; nothing where it is not connected."""
        if rank in self._ranks:
            self._ranks[rank].send(message)

    def broadcast(self, message: JsonObject) -> None:
        """Send to all ranks at the other ends."""
        for connection in self._ranks.values():
            connection.send(message)

    def poll(self, seconds: float) -> list[tuple[int, JsonObject | None]]:
        """The messages that have come by then, with their ranks; (rank, None) when a connection has ended."""
        news: list[tuple[int, JsonObject | None]] = []
        for connection, messages in self._connections.poll(seconds):
            rank = next((rank for rank, known in self._ranks.items() if known is connection), None)
            if rank is None and messages:
                rank = self._introduce(connection, messages.pop(0))
            if rank is not None:
                news += [(rank, message) for message in messages]
                if not connection.open:
                    del self._ranks[rank]
                    news.append((rank, None))
        for stranger in self._connections.all - set(self._ranks.values()):
            if time.monotonic() - stranger.born > HELLO_S:
                self._connections.drop(stranger)
        return news

    def _introduce(self, connection: Connection, hello: JsonObject) -> int | None:
        """The rank that a stranger turns out to be. A bad hello ends its connection."""
        rank, token = hello.get("hello"), str(hello.get("token"))
        known = hmac.compare_digest(token.encode(errors="replace"), self._token.encode())  # JSON has lone surrogates
        if known and isinstance(rank, int) and 0 < rank < self.here.processes and rank not in self._ranks:
            self._ranks[rank] = connection
            return rank
        self._connections.drop(connection)
        return None

    def close(self) -> None:
        """End all connections."""
        self._ranks = {}
        self._connections.close()


def listen_near(coordinator: str) -> socket.socket:
    """A server on the host of "host:port", on a port that the system picks. Where that is no address of this machine
    but leads to it, the server is on the address from which this machine reaches it."""
    host, port = split_address(coordinator)
    try:
        return listen(host, 0, everywhere=True)
    except UserError:
        return listen(local_address_towards(host, port), 0, everywhere=True)
