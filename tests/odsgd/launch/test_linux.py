"""Facts from /proc."""
import os
import subprocess
import sys

from odsgd.launch.linux import MPI_MEMORY, descendants

PARENT = "import subprocess; subprocess.Popen(['cat']).wait()"


def test_shared_memory_of_mpich_is_found_while_it_has_a_name() -> None:
    maps = (b"7f2-7f3 rw-s 00000000 00:1b 35     /dev/shm/mpich_shm_8df_0\n"
            b"7f4-7f5 rw-s 00000000 00:1b 36     /dev/shm/mpich_shm_9_1 (deleted)\n"
            b"7f6-7f7 rw-s 00000000 00:1b 37     /dev/shm/my_data\n")
    assert MPI_MEMORY.findall(maps) == [b"/dev/shm/mpich_shm_8df_0"]


def test_children_of_children_are_descendants_and_parents_are_not() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin and parent.stdout
        parent.stdin.write(b"x\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"x\n"  # the child is there
        child, = descendants(parent.pid)
        assert {parent.pid, child} <= set(descendants(os.getpid())) and os.getpid() not in descendants(parent.pid)
