"""Facts from /proc."""
from odsgd.launch.linux import MPI_MEMORY


def test_shared_memory_of_mpich_is_found_while_it_has_a_name() -> None:
    maps = (b"7f2-7f3 rw-s 00000000 00:1b 35     /dev/shm/mpich_shm_8df_0\n"
            b"7f4-7f5 rw-s 00000000 00:1b 36     /dev/shm/mpich_shm_9_1 (deleted)\n"
            b"7f6-7f7 rw-s 00000000 00:1b 37     /dev/shm/my_data\n")
    assert MPI_MEMORY.findall(maps) == [b"/dev/shm/mpich_shm_8df_0"]
