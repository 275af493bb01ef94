"""What makes a folder a checkpoint: its manifest, how files are compared with it, and whether it is of this run."""
import contextlib
import hashlib
import json
import math
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import numpy as np

from kvstore.errors import ConfigError, shown
from odsgd import __version__
from odsgd.config.files import read_text
from odsgd.training.checkpoint.disk import remove_for_good, replacing

SCHEMA = 4
"""Grows when what is kept of a run changes its form. A checkpoint of another schema is refused, not guessed at. That of
0.4.0, the first release, is 4.
"""
MANIFEST, SERVERS, WEIGHTS = "manifest.json", "servers.npz", "weights.params"
FILES = re.compile(r"(manifest\.json|servers\.npz|weights\.params|worker-[0-9]+\.npz)(\.tmp)?")
"""What a checkpoint has; any other file in a folder of that number is somebody else's, and is never removed."""
MOST_MANIFEST_NBYTES = 1 << 24

Digest = Dict[str, Any]


class DamagedError(ConfigError):
    """A checkpoint that differs from what was written; the checkpoint before it may serve."""


def versions() -> Dict[str, str]:
    """The versions of all software that decides about the bits."""
    engines: Dict[str, str] = {one: sys.modules[one].__version__ for one in ("mxnet", "torch") if one in sys.modules}
    return {"odsgd": __version__, **engines, "numpy": np.__version__, "python": platform.python_version()}


def worker_file(worker_rank: int) -> str:
    """Name of one worker's part."""
    return f"worker-{worker_rank}.npz"


def complete(root: Path) -> List[int]:
    """Iterations of the complete checkpoints below `root`, oldest first."""
    return [int(folder.name) for folder in numbered(root) if (folder / MANIFEST).is_file()]


def numbered(root: Path) -> List[Path]:
    folders = [folder for folder in root.iterdir() if folder.name.isdecimal()] if root.is_dir() else []
    return sorted(folders, key=lambda folder: int(folder.name))


def read_manifest(folder: Path) -> Dict[str, Any]:
    """The manifest of `folder`; ConfigError if it is damaged or of another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_text(path, "the manifest of a checkpoint", MOST_MANIFEST_NBYTES))
        schema = manifest["schema"]
        versions = manifest.get("versions")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"`{path}`: expected the manifest of a checkpoint, got {type(error).__name__} "
                           f"({shown(str(error))}); {REMEDY.format(folder)}") from None
    if schema != SCHEMA:
        writer = "odsgd " + shown(versions.get("odsgd", "(version not told)") if isinstance(versions, dict) else "?")
        released = isinstance(schema, int) and schema > SCHEMA
        raise ConfigError(f"`{path}` was written by {writer}, in schema {shown(schema)}; odsgd {__version__} reads "
                          f"schema {SCHEMA}. " + (f"Resume it with {writer}, or begin" if released else "Begin")
                          + " a new run in another folder")
    wrong = [name for name, fits in MANIFEST_HAS.items() if not fits(manifest.get(name))]
    if wrong or folder.name != str(manifest["iteration"]):
        raise DamagedError(f"`{path}`: `{(wrong or ['iteration'])[0]}` is not what a manifest has there; "
                           f"{REMEDY.format(folder)}")
    return dict(manifest)


def other_writer(manifest: Mapping[str, Any]) -> List[str]:
    """A line that says which version of odsgd wrote the checkpoint, if it was another one."""
    writer = (manifest.get("versions") or {}).get("odsgd", __version__)
    return [] if writer == __version__ else [f"odsgd {shown(str(writer))} wrote checkpoint {manifest['iteration']}, "
                                             f"and this is odsgd {__version__}"]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2 ** 53


def _are_digests(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and _is_count(one.get("nbytes")) and re.fullmatch("[0-9a-f]{64}", str(one.get("sha256")))
        for one in value.values())


def _are_shapes(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and isinstance(one.get("dtype"), str) and isinstance(one.get("shape"), list)
        and all(map(_is_count, one["shape"])) for one in value.values())


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_count(abs(value))


def _is_epoch(value: object) -> bool:
    return (isinstance(value, dict) and _is_count(value.get("epoch"))
            and isinstance(value.get("seconds"), (int, float)))


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


REMEDY = "remove `{}` to resume from the checkpoint before it"
MANIFEST_HAS: Dict[str, Callable[[Any], bool]] = {
    "iteration": _is_count, "since": _optional(_is_whole), "left_out": _optional(_is_count),
    "untold": _optional(_is_epoch), "epoch_so_far": _optional(_is_epoch),
    "num_workers": _is_positive, "most_workers": _optional(_is_positive), "batches_per_epoch": _optional(_is_positive),
    "spare": _optional(lambda value: isinstance(value, list) and all(map(_is_count, value))),
    "config": _optional(lambda value: isinstance(value, dict)),
    "versions": _optional(lambda value: isinstance(value, dict)),
    "course": _optional(lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_whole, value))),
    "parameters": _are_shapes, "files": _are_digests,
    "virtual_seconds": _optional(lambda value: isinstance(value, (int, float)) and 0 <= value < math.inf)}
"""The keys that are read of a manifest, each with a check of its value."""


def digest(path: Path) -> Digest:
    """Size and SHA-256 of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            sha.update(piece)
        return {"nbytes": file.tell(), "sha256": sha.hexdigest()}


def verify(folder: Path, name: str, manifest: Dict[str, Any]) -> Path:
    """The path of file `name`, whose content is what the manifest says; ConfigError in one line otherwise."""
    remedy = f"Remove `{folder}` on worker 0's host to resume from the checkpoint before it"
    if name not in manifest["files"]:
        raise DamagedError(f"checkpoint {manifest['iteration']} has no `{name}`: the job had lost that worker by then. "
                           f"{remedy}, or begin a new run")
    path, expected = folder / name, manifest["files"][name]
    try:
        got = digest(path) if path.is_file() else None
    except OSError as error:
        raise DamagedError(f"cannot read `{path}`: {error.strerror}. {remedy}") from None
    if got is None:
        raise DamagedError(f"no `{path}`, a part of checkpoint {manifest['iteration']}: a worker's part lies on the "
                           "host where that worker ran. Start the workers on the same hosts, or copy the file. "
                           f"{remedy}")
    for fact, words in (("nbytes", "{} bytes"), ("sha256", "SHA-256 {}")):
        if got[fact] != expected[fact]:
            raise DamagedError(f"`{path}`: expected {words.format(expected[fact])}, got {words.format(got[fact])}; "
                               f"it is damaged. {remedy}")
    return path


def describe(net: Any) -> Dict[str, Any]:
    """Name -> shape and dtype of every parameter."""
    return {name: {"shape": list(parameter.shape), "dtype": np.dtype(parameter.dtype).name}
            for name, parameter in net.collect_params().items()}


def check_model(manifest: Dict[str, Any], net: Any) -> None:
    """ConfigError with a diff unless the checkpoint has the parameters of `net`."""
    then, now = manifest["parameters"], describe(net)
    lines = [f"{name}: {_shape(then.get(name))} saved, {_shape(now.get(name))} now"
             for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    if lines:
        raise ConfigError(f"checkpoint {manifest['iteration']} is of another model: {_few(lines)}. "
                          "Resume with the model (and the versions of MXNet and GluonCV) it was saved with")


def check_facts(manifest: Dict[str, Any], now: Mapping[str, Any], mismatches: List[str]) -> None:
    """ConfigError unless options (`mismatches` from TrainConfig) and facts of `now` agree with the saved run."""
    lines = mismatches + [f"{name}: {manifest.get(name)} in the saved run, {value} now"
                          for name, value in now.items() if manifest.get(name) != value]
    if lines:
        raise ConfigError(f"checkpoint {manifest['iteration']} is of a run with other settings: {_few(lines)}. Resume "
                          "with the same, or begin a new run in another folder")


def _shape(entry: Optional[Dict[str, Any]]) -> str:
    return "none" if entry is None else f"{'x'.join(map(str, entry['shape']))} {entry['dtype']}"


def _few(lines: List[str]) -> str:
    more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
    return "; ".join(lines[:5]) + more


def write_manifest(folder: Path, manifest: Dict[str, Any]) -> None:
    """Write the manifest; from here on the checkpoint counts."""
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def remove(folder: Path) -> None:
    """Remove a checkpoint's files, the manifest before the others and for good, so that half a folder never counts.
    The folder goes, too, if nothing else is in it."""
    remove_for_good(folder / MANIFEST)
    with contextlib.suppress(OSError):  # other workers may be at it, too
        for name in filter(FILES.fullmatch, os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(folder / name)
        folder.rmdir()


def is_whole(manifest: Mapping[str, Any]) -> bool:
    """Whether it has the parts of all workers that the run began with."""
    began = set(range(manifest["num_workers"])) - set(manifest.get("spare") or ())
    return all(worker_file(rank) in manifest["files"] for rank in began)
