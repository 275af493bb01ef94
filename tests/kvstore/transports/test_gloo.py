"""When a script's process group takes the place of MPI. Jobs over gloo are in tests/contract and tests/integration."""
from pathlib import Path

import pytest

from kvstore.errors import ConfigError

pytest.importorskip("torch")

# isort: split
import torch

import odsgd.torch as od
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
