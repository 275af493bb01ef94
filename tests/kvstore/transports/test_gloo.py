"""When a script's process group takes the place of MPI. Jobs over gloo are in tests/contract and tests/integration."""
import os
import socket
from pathlib import Path
from typing import List

import pytest

from kvstore.errors import ConfigError

pytest.importorskip("torch")

# isort: split
import torch

import odsgd.torch as od
from kvstore.job import ending
from kvstore.transports import gloo


def test_what_is_secure_goes_by_no_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert gloo.instead_of_mpi()
        monkeypatch.setenv("ODSGD_SECURE", "1")
        assert not gloo.instead_of_mpi()
        with pytest.raises(ConfigError, match="--secure protects no messages"):
            od.create("dsync", group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_of_a_stores_own_meets_at_no_address_but_the_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"ODSGD_REPORT_FD": os.devnull, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                        "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    gloo._begin_group(gloo.LATER)
    try:
        torch.distributed.barrier()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_that_the_script_has_ended_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch,
                                                                       tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    ended = torch.distributed.new_group([0])
    torch.distributed.destroy_process_group()
    said: List[str] = []
    monkeypatch.setattr(ending, "die", lambda text, status: said.append(text))
    gloo._guarded(lambda: torch.distributed.isend(torch.ones(1), 0, ended))
    assert said == ["the script has ended the process group, which the store still used; call store.close() before "
                    "destroy_process_group()"]
