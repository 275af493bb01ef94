"""Addresses and ports: the address that a process binds, and how the scheduler's port stays reserved.

ps-lite binds exactly the text of DMLC_NODE_HOST and cannot bind a host name, so names become numbers here.
"""
import array
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from typing import Dict, List, Mapping, Optional

from kvstore.errors import ConfigError

LOOPBACK = "127.0.0.1"


def reserve_port(port: int = 0) -> socket.socket:
    """A socket that keeps a port for the scheduler; `port` 0 lets the kernel choose a free one.

    If we found a free port and released it, two jobs that start together could choose the same one. So the socket
    stays bound, without listening, while the job lasts: the kernel gives the port to no program that asks for a free
    one. The scheduler may share the port, because it asks for its number with SO_REUSEADDR (as ZeroMQ does).
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
    """Whether the address works only on this machine."""
    return ipaddress.ip_address(address).is_loopback


def address_towards(name: str) -> Optional[str]:
    """This machine's address on the way to `name`; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((name, 9))
            return str(probe.getsockname()[0])
        except (OSError, UnicodeError):
            return None


def is_own(address: str) -> bool:
    """Whether this machine has the address."""
    if is_loopback(address):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def own_address(given: Optional[str], towards: str) -> str:
    """The address that the launcher has found for this host's name, if this host has it; else its address `towards` it.

    The launcher's /etc/hosts may be old, and a public address may belong to a router before this host.
    """
    return given if given and is_own(given) else address_towards(towards) or LOOPBACK


def node_host(name: str, scheduler_host: str) -> Optional[str]:
    """The address that a process on host `name` binds and advertises; None: its agent finds it there.

    None if this machine does not know the name, and for a loopback address (many machines list their own name as
    127.0.1.1) in a job of several machines: the others could not connect to it.
    """
    address = numeric(name)
    if address is None or (is_loopback(address) and not is_loopback(scheduler_host)):
        return None
    return address


def launching_address(names: List[str]) -> str:
    """This machine's address as the named hosts see it; loopback when all of them are this machine."""
    known = [address for address in map(numeric, names) if address]
    others = [address for address in known if not is_loopback(address)]
    if known and not others and len(known) == len(names):
        return LOOPBACK
    # If no host is known (mpirun chooses, or they are aliases of ssh), guess the address towards the internet.
    for candidate in [*others, "192.0.2.1"]:
        address = address_towards(candidate)
        if address and (candidate in others or not is_loopback(address)):
            return address
    return numeric(socket.gethostname()) or LOOPBACK


# MPI and gloo take interfaces where ps-lite takes an address

RDMA = "/sys/class/infiniband"
SIOCGIFCONF = 0x8912
_ENTRY = struct.Struct("16s4x4s16x")  # struct ifreq of 64-bit Linux: name, family and port, address


def interface_of(address: str) -> Optional[str]:
    """The network interface that has this IPv4 address; None if no interface has it, or this system cannot tell."""
    if is_loopback(address):
        address = LOOPBACK  # the loopback interface has all of 127.0.0.0/8, and lists one
    if not sys.platform.startswith("linux") or struct.calcsize("P") != 8:
        return None
    listed = array.array("B", bytes(1024 * _ENTRY.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("iP", len(listed), listed.buffer_info()[0])
        size = struct.unpack("iP", fcntl.ioctl(probe.fileno(), SIOCGIFCONF, asked))[0]
    entries = _ENTRY.iter_unpack(listed[:size - size % _ENTRY.size])
    names = (name.rstrip(b"\0").decode().partition(":")[0] for name, packed in entries
             if packed == socket.inet_aton(address))
    return next(names, None)


def ring_interface(env: Mapping[str, str]) -> Dict[str, str]:
    """Variables that keep a process's MPI and gloo to the interface of its DMLC_NODE_HOST.

    By default UCX and libfabric listen on all interfaces and choose among them by speed. Docker's bridge looks as fast
    as any and has the same address on every host, so the job would not start. These two choose by themselves on a
    machine with RDMA, and on the loopback interface if the user has set UCX_TLS. gloo takes the host name's address,
    which on many machines is 127.0.1.1.
    """
    address = env["DMLC_NODE_HOST"]
    interface = interface_of(address)
    if interface is None:
        return {}
    has_rdma = os.path.isdir(RDMA) and os.listdir(RDMA)
    both = () if has_rdma or (is_loopback(address) and "UCX_TLS" in env) else ("UCX_NET_DEVICES", "FI_TCP_IFACE")
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", *both), interface)
