"""Addresses, ports and interfaces of this machine."""
import socket

import pytest

from kvstore.errors import ConfigError
from odsgd.launch import addresses


def test_a_port_in_use_is_refused_and_a_reserved_one_is_not_given_away() -> None:
    with addresses.reserve_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as scheduler:
            scheduler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            scheduler.bind(("127.0.0.1", port))
            scheduler.listen(1)
            with pytest.raises(ConfigError, match="port {} cannot be used here".format(port)):
                addresses.reserve_port(port)


def test_loopback_is_no_address_for_a_process_of_several_machines() -> None:
    assert addresses.node_host("127.0.0.1", "127.0.0.1") == "127.0.0.1"
    assert addresses.node_host("127.0.0.1", "10.0.0.9") is None
    assert addresses.node_host("no-such-host.invalid", "10.0.0.9") is None
    assert addresses.launching_address(["127.0.0.1", "127.0.0.2"]) == "127.0.0.1"


def test_mpi_keeps_to_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.interface_of("127.0.0.2") == "lo" and addresses.interface_of("192.0.2.77") is None
    monkeypatch.setattr(addresses, "RDMA", "/no/such/folder")
    both = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    assert addresses.mpi_interface({"DMLC_NODE_HOST": "127.0.0.1"}) == both
    assert addresses.mpi_interface({"DMLC_NODE_HOST": "127.0.0.1", "UCX_TLS": "tcp,self"}) == {}
    monkeypatch.setattr(addresses, "RDMA", "/proc")
    assert addresses.mpi_interface({"DMLC_NODE_HOST": "127.0.0.1"}) == {}
