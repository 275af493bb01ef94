"""The environment that an agent hands on."""
from odsgd.launch.agent import MPI_PRIVATE


def test_variables_of_mpirun_are_taken_away_and_settings_of_mpich_are_not() -> None:
    names = ["PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS", "MPIR_X", "OMPI_COMM_WORLD_RANK", "MPIR_CVAR_CH4_NETMOD",
             "MPICH_X"]
    assert [name for name in names if not MPI_PRIVATE.fullmatch(name)] == ["MPIR_CVAR_CH4_NETMOD", "MPICH_X"]
