"""How agents that mpirun starts and their launcher find each other."""
from odsgd.launch.handshake import pack, unpack


def test_jobs_survive_the_way_through_an_environment_variable() -> None:
    jobs = {"ranks": [{"env": {"A": "ü'\" \n"}}] * 200}
    assert unpack(pack(jobs)) == jobs and len(pack(jobs)) < 2000
