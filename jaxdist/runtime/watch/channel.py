"""Messages between the processes of a job outside of JAX: a star of connections around rank 0.

JAX's own channels die or block with the process that is lost: collectives wait for it, the coordination service ends
everybody. A plain connection tells at once when the process at its other end is gone. Rank 0 listens on the one address
under which it reaches the coordinator, on a port that the system picks. Address, port and a secret go through the job's
key-value store, which whoever reaches the coordinator can read. So the secret is used together with the job's token,
where there is one: the roll call sees to that, unless the program has joined the job without it.
"""

import ipaddress
import json
import os
import socket
import time

from jaxdist.errors import UserError
from jaxdist.processes import JobStore, Place, job_state
from jaxdist.runtime.network.addresses import format_address, listen, local_address_towards, split_address
from jaxdist.runtime.network.connection import Connection, Connections, open_connection, tell
from jaxdist.runtime.network.handshake import Door, Foreign
from jaxdist.runtime.network.job_token import new_token, read_token
from jaxdist.runtime.network.messages import (
    JsonObject,
    Shape,
    exactly,
    flag,
    has_shape,
    many,
    maybe,
    number,
    one_of,
    read_line,
    row,
    string,
    table,
    whole,
)
from jaxdist.runtime.watch.progress import PHASES

CONNECT_S = 60.0  # until a process that has joined must be connected
CALL_S = 0.2  # between two tries
_WHERE: Shape = {"host": string, "port": whole(1, 65535), "secret": string}  # in the store
_MESSAGES: tuple[Shape, ...] = (
    {"hello": whole(1)},  # the rank, before all else
    {"beat": row(whole(), whole(), string, number, number, whole(), string, number)},  # a `Beat`
    {"failed": string, "status": whole(0, 255), "symptom": flag},
    {"facts": table(string, string), "number": whole()},
    {"agreed": maybe(string)},
    {"pace": whole(), "seconds": exactly(dict.fromkeys(PHASES, number))},
    {"verdict": row(one_of("gone", "silent", "stuck", "failed"), many(whole()), string, whole(0, 255))},  # a `Blame`
    {"bye": flag},
)


class Channel:
    """The connections of this process, by rank: rank 0 has one to each other rank, the others one to rank 0. For one
    thread's use."""

    def __init__(self, here: Place) -> None:
        self.here = here
        self._ranks: dict[int, Connection] = {}
        store, coordinator = JobStore("channel", here.rank), job_state().coordinator_address
        token = read_token(os.environ)
        if here.rank == 0:
            server, secret = listen_near(coordinator), new_token()
            self._connections = Connections(server, Door("watch", token + secret, _MESSAGES))
            host, port = server.getsockname()[:2]
            store.set("rank0", json.dumps({"host": host, "port": port, "secret": secret}))
            return
        said = store.get("rank0", CONNECT_S)
        if said is None:
            raise TimeoutError(f"rank 0 has not said within {CONNECT_S:.0f} s where its watch listens")
        where = read_line(said.encode())
        assert where is not None and has_shape(where, [_WHERE]), said
        host, port = str(where["host"]), int(where["port"])
        if ipaddress.ip_address(host).is_unspecified:  # it listens everywhere, as the coordinator was told to
            host = split_address(coordinator)[0]
        self._ranks[0] = self._call(host, port, Door("watch", token + where["secret"], _MESSAGES))
        self._connections = Connections()
        self._connections.add(self._ranks[0])
        self._ranks[0].send({"hello": here.rank})

    def _call(self, host: str, port: int, door: Door) -> Connection:
        """The connection to rank 0, which may hang up on some of many that call at once: they call again."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return open_connection(host, port, CONNECT_S, door)
            except OSError as error:
                if isinstance(error, Foreign) and time.monotonic() < deadline:
                    time.sleep(CALL_S)
                    continue
                raise UserError(
                    f"watch: rank {self.here.rank} cannot connect to rank 0 at {format_address(host, port)}"
                    f" ({error.strerror or error}); allow connections between the hosts of the job, on ports that the"
                    " system picks"
                ) from error

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
        return news

    def _introduce(self, connection: Connection, hello: JsonObject) -> int | None:
        """The rank that a new connection turns out to be of. A bad hello ends it."""
        rank = int(hello.get("hello", 0))
        if 0 < rank < self.here.processes and rank not in self._ranks:
            self._ranks[rank] = connection
            return rank
        tell(f"watch: {connection.where} says that it is rank {rank} of {self.here.processes}; it is hung up on")
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
