"""An agent: the environment that it hands on, and its tunnel."""
import os
import shutil
import signal
from typing import List

from odsgd.launch import linux
from odsgd.launch.agent import MPI_PRIVATE, Agent
from odsgd.launch.channel import Channel, Message
from odsgd.launch.tunnel import new_certificate
from tests.jobs import until


def test_variables_of_mpirun_are_taken_away_and_settings_of_mpich_are_not() -> None:
    names = ["PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS", "MPIR_X", "OMPI_COMM_WORLD_RANK", "MPIR_CVAR_CH4_NETMOD",
             "MPICH_X"]
    assert [name for name in names if not MPI_PRIVATE.fullmatch(name)] == ["MPIR_CVAR_CH4_NETMOD", "MPICH_X"]


def test_a_tunnel_that_is_stopped_before_its_first_word_is_not_ended_at_once() -> None:
    orders = {"certificate": new_certificate(["openssl"]), "sockets": [], "address": "127.0.0.1", "port": 0,
              "hang_timeout_s": 600.0}
    agent = Agent({"tells_losses": False, "tunnel": orders}, Channel(*os.pipe()))
    agent._open_tunnel(orders)
    assert agent.tunnel and agent.tunnel.stdout and agent.passage
    os.kill(agent.tunnel.pid, signal.SIGSTOP)
    until(lambda: agent.tunnel and linux.state(agent.tunnel.pid) == "T")
    agent._watch_tunnel()
    os.kill(agent.tunnel.pid, signal.SIGCONT)
    said: List[Message] = []
    until(lambda: agent.passage and (said.extend(agent.passage.receive()) or said or not agent.passage.open))
    assert said[0]["event"] == "listens"
    agent._close_tunnel()
    agent.tunnel.wait(60)
    agent.tunnel.stdout.close()
    for fd in (agent.channel.read_fd, agent.channel.write_fd):
        os.close(fd)
    agent.selector.close()
    shutil.rmtree(agent.folder)
