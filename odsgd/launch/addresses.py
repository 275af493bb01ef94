"""Addresses and ports: which one a process is told to bind, and how the scheduler's port stays ours.

ps-lite binds exactly the text of DMLC_NODE_HOST and cannot bind a host name, so names become numbers here.
"""
import ipaddress
import socket
from typing import List, Optional

from kvstore.errors import ConfigError

LOOPBACK = "127.0.0.1"


def reserve_port(port: int = 0) -> socket.socket:
    """A socket that keeps a port for the scheduler; `port` 0 lets the kernel choose a free one.

    The usual way, find a port, release it and hope, lets two jobs started together choose the same one. Here the
    socket stays bound, without listening, while the job lasts: the kernel then gives the port to nobody who asks for
    any free one, while the scheduler, which asks for it by number with SO_REUSEADDR (as ZeroMQ does), may share it.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("", port))
    except OSError as error:
        holder.close()
        raise ConfigError(f"port {port} cannot be used here: {error.strerror}. Name another one with --port, "
                          "or leave the option out and a free one is chosen") from None
    return holder


def numeric(name: str) -> Optional[str]:
    """The IPv4 address of a host name, or None if it is not known here (e.g. an alias of ~/.ssh/config)."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError):
        return None


def is_loopback(address: str) -> bool:
    """Whether only this very machine can use the address."""
    return ipaddress.ip_address(address).is_loopback


def address_towards(name: str) -> Optional[str]:
    """This machine's address on the way to `name`; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((name, 9))
            return str(probe.getsockname()[0])
        except (OSError, UnicodeError):
            return None


def node_host(name: str, root_uri: str) -> Optional[str]:
    """The address a process on host `name` binds and advertises, or None: its agent finds it out, over there.

    None for a name not known here, and for a name that means loopback (many machines list their own name as
    127.0.1.1) while the job spans several machines: the others could not connect to that.
    """
    address = numeric(name)
    if address is None or is_loopback(address) and not is_loopback(root_uri):
        return None
    return address


def launching_address(names: List[str]) -> str:
    """This machine's address as the named hosts see it; loopback when all of them are this machine."""
    known = [address for address in map(numeric, names) if address]
    others = [address for address in known if not is_loopback(address)]
    if known and not others and len(known) == len(names):
        return LOOPBACK
    # Without any known host (mpirun chooses, or aliases of ssh), the way out of this machine is the best guess.
    for candidate in others + ["192.0.2.1"]:
        address = address_towards(candidate)
        if address and (candidate in others or not is_loopback(address)):
            return address
    return numeric(socket.gethostname()) or LOOPBACK
