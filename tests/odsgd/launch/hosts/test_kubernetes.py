"""The manifests of a job, and what a pod makes of its environment."""
import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

import pytest
import yaml

from kvstore.errors import ConfigError
from odsgd.cli import main
from odsgd.config.launch import LaunchOptions, Workers
from odsgd.launch import command, messages, pod
from odsgd.launch.connections import handshake
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import kubernetes

SECRET = 64 * "a"


def environ(*words: str, **more: str) -> Dict[str, str]:
    return {"ODSGD_LAUNCH": shlex.join(words), "ODSGD_LAUNCHER": "digits-0.digits:9370", "ODSGD_SECRET": SECRET,
            "ODSGD_POD_IP": "10.1.2.3", **more}


def test_a_pod_launches_the_job_that_was_asked_for() -> None:
    asked = command.parse(["--launcher", "kubernetes", "-n", "3", "-s", "auto", "--env", "A:b c'd",
                           "--env-worker", "B=1,2", "--max-restarts", "2", "--rejoin-timeout", "90",
                           "--grace", "7.5", "--on-worker-loss", "continue", "--port", "5000", sys.executable,
                           "train.py", "--lr", "it's"])
    job = pod.job_of(environ(*kubernetes.words(asked)))
    assert (job.launcher, job.secret, job.host_ip, job.agents_port) == ("kubernetes", SECRET, "10.1.2.3", 9370)
    assert job.slots == (Host("digits-0", here=True), Host("digits-1"), Host("digits-2"))
    same = ("command", "num_workers", "num_servers", "servers_beside_workers", "env", "env_worker", "max_restarts",
            "rejoin_timeout_s", "grace_s", "on_worker_loss", "port", "startup_timeout_s", "hang_timeout_s")
    assert [getattr(job, name) for name in same] == [getattr(asked, name) for name in same]


def test_the_secret_and_values_of_variables_are_in_the_secret_alone() -> None:
    asked = command.parse(["--launcher", "kubernetes", "-n", "2", "--env", "KEY:hunter2", "true"])
    secret, service, job = kubernetes.manifests(asked, "digits", LaunchOptions(
        num_workers=Workers(2, 2), launcher="kubernetes", image="image"))
    assert len(bytes.fromhex(secret["stringData"]["secret"])) == 32
    shown = yaml.safe_dump_all([service, job])
    assert secret["stringData"]["secret"] not in shown
    assert "hunter2" in secret["stringData"]["launch"] and "hunter2" not in shown


def test_a_pod_that_has_its_own_shared_memory_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump({
        "volumes": [{"name": "memory"}],
        "containers": [{"volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}]}]}))
    options = LaunchOptions(num_workers=Workers(2, 2), launcher="kubernetes", image="image",
                            pod=str(tmp_path / "pod.yaml"))
    job = kubernetes.manifests(command.parse(["--launcher", "kubernetes", "-n", "2", "true"]), "digits", options)[2]
    pod = job["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "memory"}] and len(pod["containers"][0]["volumeMounts"]) == 1


def test_nobody_joins_a_job_of_pods() -> None:
    job = pod.job_of(environ("-n", "2", "-s", "1", "--wire", "sockets", "--on-worker-loss", "continue", "true"))
    assert "its launcher is kubernetes" in job.closed


def test_the_users_part_of_a_pod_stays_and_ours_is_laid_on_it(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump({
        "nodeSelector": {"disk": "fast"}, "restartPolicy": "Always", "volumes": [{"name": "data"}],
        "containers": [{"name": "mine", "image": "other", "env": [{"name": "A", "value": "1"}]}, {"name": "second"}]}))
    options = LaunchOptions(num_workers=Workers(2, 2), launcher="kubernetes", image="image", resources={"cpu": "2"},
                            pod=str(tmp_path / "pod.yaml"))
    asked = command.parse(["--launcher", "kubernetes", "-n", "2", "true"])
    spec = kubernetes.manifests(asked, "digits", options)[2]["spec"]
    pod = spec["template"]["spec"]
    first, second = pod["containers"]
    assert (pod["nodeSelector"], pod["restartPolicy"], second) == ({"disk": "fast"}, "Never", {"name": "second"})
    assert (first["name"], first["image"], first["env"][-1]) == ("mine", "image", {"name": "A", "value": "1"})
    assert first["resources"] == {"requests": {"cpu": "2"}, "limits": {"cpu": "2"}}
    assert [volume["name"] for volume in pod["volumes"]] == ["data", "shared-memory"]


@pytest.mark.parametrize("flags, complaint", [
    ([], "needs --image IMAGE"),
    (["--image", "x", "--name", "Digits"], "--name: expected small letters"),
    (["--image", "x", "--name", "d" * 53], "at most 52 of them"),
    (["--image", "x", "--resources", "cpu:4"], "--resources: cannot read `cpu:4`"),
    (["--image", "x", "--resources", "cpu=1,cpu=2"], "cannot read `cpu=2`"),
    (["--image", "x", "--pod", "no/such.yaml"], "cannot read `no/such.yaml`"),
    (["--image", "x", "--host-ip", "10.0.0.1"], "--host-ip does not work with --launcher kubernetes"),
    (["--image", "x", "-H", "hosts"], "has hosts of its own; leave out -H"),
])
def test_mistakes_are_told_in_one_line(flags: List[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--launcher", "kubernetes", "-n", "2", "--dry-run", *flags, "true"]) == 64
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_flags_of_pods_are_for_kubernetes() -> None:
    with pytest.raises(ConfigError, match="--dry-run works with --launcher kubernetes only"):
        command.parse(["-n", "1", "--dry-run", sys.executable])


def test_no_kubectl_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ODSGD_KUBECTL", "no-such-kubectl")
    assert main(["launch", "--launcher", "kubernetes", "-n", "2", "--image", "x", "true"]) == 64
    assert capsys.readouterr().err == (
        "odsgd launch: no-such-kubectl is not a program on this machine; install kubectl, name it in ODSGD_KUBECTL, or "
        "take the manifests that --dry-run shows to where it is\n")


def test_a_pod_outside_kubernetes_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", kubernetes.MODULE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 64 and done.stderr.startswith("odsgd pod: JOB_COMPLETION_INDEX is not set; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("variable, value, complaint", [
    ("ODSGD_LAUNCHER", "digits-0", "expected NAME:PORT"), ("ODSGD_LAUNCHER", "a:99999", "expected NAME:PORT"),
    ("ODSGD_LAUNCH", "-n 2 'true", "not what a shell would read"), ("ODSGD_SECRET", "xyz", "hexadecimal"),
    ("ODSGD_LAUNCH", "", "ODSGD_LAUNCH is not set")])
def test_an_environment_that_cannot_be_read_is_told(variable: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        pod.job_of(environ("-n", "2", "true", **{variable: value}))


def test_a_pod_that_nobody_answers_says_where_it_has_knocked(capsys: pytest.CaptureFixture[str]) -> None:
    there = environ("-n", "2", "-s", "0", "--startup-timeout", "0.1", "true", ODSGD_LAUNCHER="127.0.0.1:1")
    assert pod.serve(1, there) == 75
    assert "no launcher has answered at 127.0.0.1:1 for 0.1 s" in capsys.readouterr().err


def test_orders_are_taken_from_the_launcher_alone() -> None:
    import json
    import socket
    ours, theirs = socket.socketpair()
    with ours, theirs:
        env = {"A": "b", "ODSGD_SECRET": "never sent"}
        told = messages.Orders([], env, [], 5.0, None, tells_losses=False, sockets={})
        for secret, nonce in ((SECRET, "n"), (64 * "b", "n"), (SECRET, "another call's")):
            sealed = json.dumps(vars(handshake.seal(told, secret, nonce))).encode()
            assert b"never sent" not in sealed
            theirs.sendall(sealed + b"\n")
        for orders, proof in (("", "\ud800"), ("\ud800", "")):  # no text that could be encoded
            theirs.sendall(json.dumps({"orders": orders, "proof": proof}).encode() + b"\n")
        got = handshake.receive_orders(ours, SECRET, "n")
        assert got == dataclasses.replace(told, env={"A": "b", "ODSGD_SECRET": SECRET})
        for _ in range(4):
            with pytest.raises(OSError, match="does not know the job's secret"):
                handshake.receive_orders(ours, SECRET, "n")
        theirs.shutdown(socket.SHUT_WR)
        assert handshake.receive_orders(ours, SECRET, "n") is None
