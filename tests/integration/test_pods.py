"""The pods of a Kubernetes job as processes: each in namespaces of its own, with its manifest's environment alone."""
from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import yaml

from odsgd.lab import processes
from odsgd.lab.cluster import Cluster
from tests.integration import debian
from tests.integration.launching import MARK, PATIENCE_S, ROOT, command_line, marked
from tests.integration.test_emulated_cluster import WHY_NOT
from tests.jobs import until

pytestmark = pytest.mark.slow
POD = {"nodeSelector": {"disk": "fast"}, "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "sets"}}],
       "containers": [{"volumeMounts": [{"name": "data", "mountPath": "/data"}], "env": [{"name": "A", "value": "1"}]}]}


def shown(*words: str, env: Dict[str, str] | None = None) -> List[Dict[str, Any]]:
    """The manifests that `odsgd launch --dry-run` shows: Secret, Service, Job."""
    done = subprocess.run([sys.executable, "-m", "odsgd", "launch", "--launcher", "kubernetes", "--dry-run", "--image",
                           "registry/odsgd:1", "--name", "digits", *words], capture_output=True, text=True,
                          timeout=PATIENCE_S, cwd=ROOT, env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def environment(manifests: List[Dict[str, Any]], index: int, address: str) -> Dict[str, str]:
    """What Kubernetes makes of the manifests' `env`, and adds to a pod of an indexed Job."""
    secret, _, job = manifests
    fields = {"status.podIP": address}
    env = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in job["spec"]["template"]["spec"]["containers"][0]["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == secret["metadata"]["name"]
            env[variable["name"]] = secret["stringData"][source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            env[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            env[variable["name"]] = filled_in(variable["value"], env)
    return env


def filled_in(value: str, env: Dict[str, str]) -> str:
    """As Kubernetes does: $$ is a $, and $(NAME) a variable that stands before, if there is one."""
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda at: "$" if at[0] == "$$" else env.get(at[1], at[0]), value)


class Pods:
    """A job's pods on an emulated cluster, whose hosts have the names that the headless Service would give them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.mark = cluster, uuid.uuid4().hex
        self.processes: List[subprocess.Popen[str]] = []
        with open(cluster.folder / "etc-hosts", "a", encoding="ascii") as names:
            names.write("10.0.0.1 digits-0.digits\n")

    def start(self, manifests: List[Dict[str, Any]], image: Dict[str, str]) -> None:
        """Each pod's command, in an empty environment but for the image's and the manifest's."""
        job = manifests[2]["spec"]
        command = job["template"]["spec"]["containers"][0]["command"]
        for index in range(job["completions"]):
            env = {"PATH": os.path.dirname(sys.executable) + os.pathsep + os.defpath, MARK: self.mark, **image,
                   **environment(manifests, index, f"10.0.0.{index + 1}")}
            words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *command]
            self.processes.append(self.cluster.popen(words, host=index, cwd="/", **processes.READ_TO_THE_END))

    def wait(self) -> List[subprocess.CompletedProcess[str]]:
        done = [processes.completed(process, PATIENCE_S) for process in self.processes]
        assert not marked(self.mark)
        return done


@pytest.fixture
def pods() -> Iterator[Pods]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with Cluster.up(hosts=2) as cluster:
        yield Pods(cluster)


def test_a_job_trains_with_nothing_but_the_environment_of_its_manifest(pods: Pods, tmp_path: Path) -> None:
    pods.start(shown("-n", "2", "-s", "1", "--env", "OMP_NUM_THREADS:1", "odsgd", "train", "--dataset", "digits",
                     "--model", "mlp", "--epochs", "1", "--out", str(tmp_path / "runs")), {})
    first, second = pods.wait()
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr + second.stderr
    assert list((tmp_path / "runs").rglob("metrics.jsonl"))
    assert "worker 0 | " in first.stdout and second.stdout == ""
    assert set(re.findall("odsgd launch: (.{13})", first.stderr)) <= {"warning: star"}  # of a start that takes long


def test_kill_9_of_a_worker_in_another_pod_fails_the_job_and_names_it(pods: Pods) -> None:
    pods.start(shown("-n", "2", "-s", "0", "sleep", "600"), {})

    def workers() -> List[int]:
        return [pid for pid, env in marked(pods.mark).items() if env.get("ODSGD_WORKER_RANK") == "1"
                and command_line(pid).startswith("sleep")]
    until(workers, PATIENCE_S)
    os.kill(workers()[0], signal.SIGKILL)
    first, second = pods.wait()
    assert (first.returncode, second.returncode) == (137, 0), first.stderr
    assert "worker 1 failed (host " in first.stderr and "killed by SIGKILL" in first.stderr


def test_a_job_that_has_failed_starts_again_in_the_same_pods(pods: Pods) -> None:
    pods.start(shown("-n", "2", "--store", "none", "--max-restarts", "1", "sh", "-c",
                     "echo '$$' \"$(echo attempt ${ODSGD_RESTARTS:-0})\"; test -n \"$ODSGD_RESTARTS\" || exit 3"), {})
    first, second = pods.wait()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "restart 1 of 1" in first.stderr
    assert {f"worker {rank} | $$ attempt 1" for rank in (0, 1)} <= set(first.stdout.splitlines())


def test_the_manifests_are_what_the_api_takes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(POD))
    package = schemas(request.config)
    manifests: List[Dict[str, Any]] = []
    for more in [], ["--max-restarts", "2", "--namespace", "lab", "--resources", "cpu=4,memory=8Gi,nvidia.com/gpu=1",
                     "--pod", str(tmp_path / "pod.yaml")]:
        manifests += shown("-n", "4", "-s", "auto", *more, "odsgd", "train", "--kvstore", "odsgd")
    assert len(manifests) == 6 and complaint(manifests, package, tmp_path) == ""
    manifests[-1]["spec"]["completionMod"] = "Indexed"
    assert "completionMod" in complaint(manifests, package, tmp_path)


def complaint(manifests: List[Dict[str, Any]], package: Path, folder: Path) -> str:
    """What Kubernetes 1.31 would not understand of them, or take for something else."""
    (folder / "manifest.yaml").write_text(yaml.safe_dump_all(manifests))
    done = subprocess.run([sys.executable, "-m", "kubernetes_validate", "--strict", "-k", "1.31",
                           str(folder / "manifest.yaml")], env={**os.environ, "PYTHONPATH": str(package)},
                          capture_output=True, text=True, timeout=PATIENCE_S)
    return done.stdout + done.stderr if done.returncode else ""


def schemas(config: pytest.Config) -> Path:
    """The folder of the package `kubernetes-validate`, which has the API's schemas: 140 MB, in pytest's cache."""
    folder = config.cache.mkdir("kubernetes-validate")
    if not (folder / "kubernetes_validate").is_dir():
        debian.ask("kubernetes-validate is not here, and pip would load 140 MB")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--retries", "0", "--timeout",
                                   "5", "--target", str(folder / "new"), "kubernetes-validate"], capture_output=True,
                                  text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip has not installed kubernetes-validate within {PATIENCE_S:g} s")
        if done.returncode:
            pytest.skip(f"pip cannot install kubernetes-validate: {(done.stderr.splitlines() or [''])[-1]}")
        for path in sorted((folder / "new").iterdir(), key=lambda path: path.name == "kubernetes_validate"):
            path.rename(folder / path.name)
    return folder


def test_kubectl_that_reaches_no_cluster_is_one_line_with_its_words(tmp_path: Path) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here")
    done = subprocess.run([sys.executable, "-m", "odsgd", "launch", "--launcher", "kubernetes", "--image", "odsgd:1",
                           "-n", "1", "true"], capture_output=True, text=True, timeout=PATIENCE_S,
                          env={**os.environ, "KUBECONFIG": str(tmp_path / "none"),
                               "ODSGD_KUBECTL": "kubectl --server=http://127.0.0.1:1"}, cwd=ROOT)
    assert done.returncode == 70 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("odsgd launch: kubectl create ended with exit code 1: ")
    assert "refused" in done.stderr
