"""A job on Kubernetes: its manifests, `kubectl create`, and the port that its agents call. Its pods run `pod.py`.

    Secret     the job's secret, and its command with the values of --env; no pod's description shows them
    Service    without an address of its own (headless): it gives pod 0 a name
    Job        indexed, one pod per worker, pod k with worker k; servers beside them, as on hosts of one slot each

If a pod fails, so does the job: the launcher in pod 0 has said why. With --max-restarts, Kubernetes replaces a pod that
it has removed itself (a drained node), and the launcher starts the processes anew.
"""
import secrets
import shlex
import shutil
import sys
from typing import Any, Dict, List

import yaml

from kvstore.errors import EXIT_FAILURE, ConfigError, shown
from odsgd.config import launch
from odsgd.config.files import read_yaml_file
from odsgd.config.launch import LaunchOptions
from odsgd.launch.hosts.listener import AgentListener
from odsgd.launch.hosts.ssh import program
from odsgd.launch.plan import Job, Plan
from odsgd.tools import ran

Manifest = Dict[str, Any]
MODULE = "odsgd.launch.pod"
AGENTS_PORT = 9370
"""Pod 0 listens there; below the ports that the kernel hands out."""
APPLIED_WITHIN_S = 120.0
SHARED_MEMORY, OURS = "shared-memory", "app.kubernetes.io/instance"
"""Names of the volume for shared memory, and of the label that everything of a job has."""


def submit(job: Job, options: LaunchOptions) -> int:
    """Show the manifests, or hand them to kubectl; return the exit code."""
    if not options.image:
        raise ConfigError("--launcher kubernetes needs --image IMAGE: a container image with odsgd and what the "
                          "workers' command needs (docs/how-to/containers.md)")
    name = options.name or f"odsgd-{secrets.token_hex(3)}"
    text = yaml.safe_dump_all(manifests(job, name, options), sort_keys=False)
    if options.dry_run:
        print(text, end="")
        return 0
    kubectl = program("ODSGD_KUBECTL", "kubectl")
    if not shutil.which(kubectl[0]):
        raise ConfigError(f"{kubectl[0]} is not a program on this machine; install kubectl, name it in ODSGD_KUBECTL, "
                          "or take the manifests that --dry-run shows to where it is")
    done = ran([*kubectl, "create", "-f", "-"], "--launcher kubernetes", APPLIED_WITHIN_S, text)
    if done.returncode:
        said = " ".join(done.stderr.split()) or "no reason given"
        print(f"odsgd launch: kubectl create ended with exit code {done.returncode}: {said}", file=sys.stderr)
        return EXIT_FAILURE
    where = f" -n {options.namespace}" if options.namespace else ""
    print(f"odsgd launch: Kubernetes has job {name}; its output: kubectl logs{where} -f --tail=-1 -l "
          f"{OURS}={name},batch.kubernetes.io/job-completion-index=0", file=sys.stderr)
    return 0


def manifests(job: Job, name: str, options: LaunchOptions) -> List[Manifest]:
    """Everything that Kubernetes needs to know of a job of this name."""
    namespace = {"namespace": options.namespace} if options.namespace else {}
    labels = {"app.kubernetes.io/name": "odsgd", OURS: name}
    metadata = {"name": name, **namespace, "labels": labels}
    template = {"metadata": {"labels": dict(labels)}, "spec": _pod_spec(job, name, options)}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque",
         "stringData": {"secret": secrets.token_hex(32), "launch": shlex.join(words(job))}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {OURS: name},
                  "ports": [{"name": "launcher", "port": AGENTS_PORT}]}},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job_spec(job, template)}]


def _job_spec(job: Job, template: Manifest) -> Manifest:
    spec: Manifest = {"completionMode": "Indexed", "completions": job.num_workers, "parallelism": job.num_workers,
                      "backoffLimit": job.max_restarts}
    if job.max_restarts:
        spec["podFailurePolicy"] = {"rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}]}
    return {**spec, "template": template}


def _pod_spec(job: Job, name: str, options: LaunchOptions) -> Manifest:
    """Our part of a pod on top of the user's, whose first container runs the job."""
    theirs = _pod(options.pod) if options.pod else {}
    first, *others = theirs.pop("containers", None) or [{}]
    mounts, volumes = first.get("volumeMounts") or [], theirs.get("volumes") or []
    if all(mount.get("mountPath") != "/dev/shm" for mount in mounts):
        mounts = [*mounts, {"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
        volumes = [*volumes, {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    ours = {**first, "name": first.get("name", "odsgd"), "image": options.image, "command": ["python3", "-m", MODULE],
            "env": [*_environment(name), *(first.get("env") or [])], "volumeMounts": mounts}
    if options.resources:
        ours["resources"] = {"requests": dict(options.resources), "limits": dict(options.resources)}
    return {"terminationGracePeriodSeconds": int(job.grace_s) + 25, **theirs,
            "subdomain": name, "restartPolicy": "Never", "enableServiceLinks": False,
            "containers": [ours, *others], **({"volumes": volumes} if volumes else {})}


def _environment(name: str) -> List[Manifest]:
    first = pod_names(name, 1)[0]
    return [*({"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
              for variable, key in (("ODSGD_LAUNCH", "launch"), ("ODSGD_SECRET", "secret"))),
            {"name": "ODSGD_LAUNCHER", "value": f"{first}.{name}:{AGENTS_PORT}"},
            {"name": "ODSGD_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def words(job: Job) -> List[str]:
    """The options and the command that make this job in a pod, which has none of this process's variables."""
    servers = "auto" if job.servers_beside_workers else str(job.num_servers)
    return ["-n", str(job.num_workers), "-s", servers, *launch.words(job), *job.command]


def _pod(path: str) -> Manifest:
    """The user's part of a pod's description."""
    pod = read_yaml_file(path)
    listed = [pod.get(key) or [] for key in ("containers", "volumes")] if isinstance(pod, dict) else [None]
    if not all(isinstance(parts, list) and all(isinstance(part, dict) for part in parts) for parts in listed):
        raise ConfigError(f"--pod {shown(path)}: expected the `spec` of a pod, e.g. `nodeSelector:`, `volumes:`, and "
                          "`containers:` with `volumeMounts:` in the first")
    first = (pod.get("containers") or [{}])[0]
    if not all(isinstance(first.get(key) or [], list) for key in ("env", "volumeMounts")):
        raise ConfigError(f"--pod {shown(path)}: expected lists for `env` and `volumeMounts` of the first container")
    return pod


def open_port(job: Job, plan: Plan) -> AgentListener:
    """Wait for the agents of the other pods."""
    expected = {host.address: [] if host.here else plan.on(host) for host in job.slots}
    return AgentListener(job, expected, plan.secret, "", job.agents_port)


def pod_names(name: str, count: int) -> List[str]:
    """The host names of a job's pods, as Kubernetes gives them."""
    return [f"{name}-{index}" for index in range(count)]
