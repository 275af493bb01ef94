"""Facts from /proc; addresses, ports and interfaces of this machine."""
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from kvstore.errors import ConfigError
from odsgd.launch import addresses, linux
from odsgd.launch.linux import MPI_FILE, descendants
from tests.jobs import ROOT

PARENT = "import subprocess; subprocess.Popen(['cat']).wait()"


def test_shared_memory_of_mpich_is_found_while_it_has_a_name() -> None:
    maps = (b"7f2-7f3 rw-s 00000000 00:1b 35     /dev/shm/mpich_shm_8df_0\n"
            b"7f4-7f5 rw-s 00000000 00:1b 36     /dev/shm/mpich_shm_9_1 (deleted)\n"
            b"7f6-7f7 rw-s 00000000 00:1b 37     /dev/shm/my_data\n")
    assert MPI_FILE.findall(maps) == [b"/dev/shm/mpich_shm_8df_0"]


@pytest.mark.parametrize("files, cores", [(["350000 100000\n"], 3), (["50000 100000\n"], 1), (["max 100000\n"], 8),
                                          (["250000\n", "100000\n"], 2), (["-1\n", "100000\n"], 8), ([], 8)])
def test_a_container_has_the_processors_of_its_limit(files: List[str], cores: int, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(files):
        (tmp_path / str(number)).write_text(text)
    paths = [str(tmp_path / str(number)) for number in range(len(files))] or [str(tmp_path / "none")]
    monkeypatch.setattr(linux, "CPU_LIMITS", (paths,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert linux.cores() == cores


def test_as_many_files_are_allowed_as_may_be_and_never_fewer() -> None:
    program = ("import resource; from odsgd.launch.linux import allow_files\n"
               "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
               "for number in (50, 200, 1000):\n"
               "    print(allow_files(number), *resource.getrlimit(resource.RLIMIT_NOFILE))")
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    assert told.stdout.splitlines() == ["True 100 300", "True 200 300", "False 300 300"]


def test_children_of_children_are_descendants_and_parents_are_not() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin and parent.stdout
        parent.stdin.write(b"x\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"x\n"  # the child is there
        child, = descendants(parent.pid)
        assert {parent.pid, child} <= set(descendants(os.getpid())) and os.getpid() not in descendants(parent.pid)


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


def test_mpi_and_gloo_keep_to_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.interface_of("127.0.0.2") == "lo" and addresses.interface_of("192.0.2.77") is None
    monkeypatch.setattr(addresses, "RDMA", "/no/such/folder")
    gloos = {"GLOO_SOCKET_IFNAME": "lo"}
    all_of_them = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", **gloos}
    assert addresses.ring_interface({"DMLC_NODE_HOST": "127.0.0.1"}) == all_of_them
    assert addresses.ring_interface({"DMLC_NODE_HOST": "127.0.0.1", "UCX_TLS": "tcp,self"}) == gloos
    monkeypatch.setattr(addresses, "RDMA", "/proc")
    assert addresses.ring_interface({"DMLC_NODE_HOST": "127.0.0.1"}) == gloos
    assert addresses.ring_interface({"DMLC_NODE_HOST": "192.0.2.77"}) == {}
