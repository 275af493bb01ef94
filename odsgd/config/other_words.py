"""The words of MXNet and of the OD-SGD authors' scripts, so that old job scripts work as they are."""
from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional

from kvstore import methods as algorithms
from kvstore.options import integer, name, option
from odsgd.config.train_options import DATASETS

_AUTHORS = "In the words of the OD-SGD authors' scripts"

MXNETS = {**dict.fromkeys(("dist_sync", "dist_device_sync", "dist"), "ssgd"),
          **dict.fromkeys(("dist_async", "dist_device_async"), "asgd"), "device": "local"}
"""MXNet's name of a store -> ours; with a local optimizer ssgd is odsgd."""

AUTHORS = {field.name: field for field in dataclasses.fields(dataclasses.make_dataclass("Authors", [
    ("num_worker", int, option(4, integer(0), "that many data_threads, where the data set has them", group=_AUTHORS)),
    ("mode", str, option("hybrid", name("mode", ("symbolic", "hybrid", "imperative")), "imperative: no_hybridize; "
                         "the others: hybridize", group=_AUTHORS))]))}
"""Flags of the OD-SGD authors' scripts that this project does not have, and what replaces each."""


def store_named(asked: str, optimizer_local: Optional[str]) -> str:
    """Our name of the store that a user asks for, perhaps in MXNet's words."""
    if asked in MXNETS:
        return "odsgd" if MXNETS[asked] == "ssgd" and optimizer_local is not None else MXNETS[asked]
    return algorithms.find(asked, "kvstore", also=MXNETS).name


def put_into_our_words(flags: Dict[str, Any]) -> None:
    """Replace the authors' flags by ours; where both are given ours wins."""
    if "mode" in flags:
        flags.setdefault("hybridize", flags.pop("mode") != "imperative")
    threads = flags.pop("num_worker", None)
    dataset = DATASETS.get(flags.get("dataset", ""))
    if threads and dataset and "data_threads" in dataset.options:
        flags.setdefault("data_threads", threads)
