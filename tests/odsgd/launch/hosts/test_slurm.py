"""What is read of Slurm's variables; the rest is in tests/integration/test_slurm.py."""
import pytest

from kvstore.errors import ConfigError
from odsgd.launch.hosts import slurm


@pytest.mark.parametrize("value", ["0", "two", "²", "9" * 5000, "-1"])
def test_a_number_of_slots_that_is_none_is_told(value: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_NTASKS_PER_NODE is"):
        slurm._slots(value)


def test_no_allocation_is_told_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs an allocation.*salloc"):
        slurm.allocated({"SLURM_JOB_ID": "1"})


def test_a_node_runs_one_agent_and_nothing_secret_is_on_the_command_line() -> None:
    command = slurm.srun_command(["a", "b"])
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,b", "--export=ALL"} <= set(command)
