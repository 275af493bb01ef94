"""Whether a run goes on with the run in its folder, and whether the two are of one kind."""
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from kvstore.errors import ConfigError
from kvstore.fronts.gluon.store import Store
from kvstore.job import environment
from odsgd.config.train import TrainConfig
from odsgd.training.checkpoint import manifests, resuming
from odsgd.training.checkpoint.mirror import CheckpointMirror
from odsgd.virtual import description


def resume(config: TrainConfig, store: Store, net: Any, folder: Path, mirror: Optional[CheckpointMirror],
           batches_per_epoch: int) -> Tuple[Dict[str, Any], List[str]]:
    """Go on from worker 0's newest complete checkpoint, if so asked; else refuse to mix with a run that is there.

    A job that the launcher has started again goes on from the newest checkpoint, if there is one. Collective. Returns
    the checkpoint's manifest, which is empty for a run that begins, and what to warn of.
    """
    again = environment.restarts() > 0
    if not config.resume and not again:
        if store.rank == 0:
            _check_empty(config, folder, mirror)
        return {}, []
    manifest, warnings = resuming.resume(
        folder, store, net, lambda manifest: _check(manifest, config, store, net, batches_per_epoch), mirror)
    if not manifest and not again:
        raise ConfigError(f"no complete checkpoint in `{folder}`; check --out, or leave --resume out to begin a new "
                          "run")
    return manifest, warnings


def _check_empty(config: TrainConfig, folder: Path, mirror: Optional[CheckpointMirror]) -> None:
    there = manifests.complete(folder)
    if there:
        raise ConfigError(f"`{folder.parent}` holds a run with checkpoints up to iteration {there[-1]}; go on with it "
                          "(--resume), take another --out, or remove it")
    if mirror is not None and mirror.holds(manifests.MANIFEST):
        raise ConfigError(f"`{config.checkpoint_to}` holds a run's checkpoints; go on with it (--resume), or take "
                          "another --checkpoint-to")


def _check(manifest: Dict[str, Any], config: TrainConfig, store: Store, net: Any, batches_per_epoch: int) -> None:
    """ConfigError unless a checkpoint fits this run. With ``-n MIN:MAX`` the number of workers may have changed."""
    workers = {"num_workers": store.num_workers, "batches_per_epoch": batches_per_epoch}
    others = environment.most_workers() is not None and manifest["num_workers"] != store.num_workers
    now = {**({} if others else workers), "cluster": cluster(config)}
    manifests.check_facts(manifest, now, config.mismatches(manifest["config"] or {}))
    manifests.check_model(manifest, net)


def cluster(config: TrainConfig) -> Optional[str]:
    """Text that tells one virtual cluster from another; None for a real cluster."""
    if config.cluster is None:
        return None
    return f"virtual, settings {description.checksum(config.virtual_cluster):08x}"
