"""Addresses: how they are written, where this machine is reached, and listening on one of them."""

import errno
import ipaddress
import os
import socket
import time

from jaxdist.errors import UserError

NAME_S = 30.0  # until the name of the host on which to listen must be known to it


class PortTaken(UserError):
    """Another program listens on the port."""


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


def split_address(address: str, option: str = "") -> tuple[str, int]:
    """("host", port) of "host:port" or "[IPv6 address]:port". Raises `UserError`.

    option: that gave the address; by default the environment did.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536) or not host.strip("[]"):
        said = f"{option}: {address!r}" if option else f"coordinator: {address!r} in the environment"
        raise UserError(f"{said} is no address; allowed: host:port of rank 0")
    return host.removeprefix("[").removesuffix("]"), int(port)


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this host's address that nobody listens on now; address "": on none of its addresses."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def port_problem(port: int, address: str = "127.0.0.1") -> str | None:
    """Why a coordinator could not listen on this port of this host's address, or None; address "": on all of them."""
    try:
        socket.create_server((address, port)).close()
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
