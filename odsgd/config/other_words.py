"""The flags of the OD-SGD authors' scripts, so that their command lines work as they are."""
from __future__ import annotations

import dataclasses
from typing import Any, Dict

from kvstore.options import integer, name, option
from odsgd.config.train_options import DATASETS

_AUTHORS = "In the words of the OD-SGD authors' scripts"

AUTHORS = {field.name: field for field in dataclasses.fields(dataclasses.make_dataclass("Authors", [
    ("num_worker", int, option(4, integer(0), "that many data_threads, where the data set has them", group=_AUTHORS)),
    ("mode", str, option("hybrid", name("mode", ("symbolic", "hybrid", "imperative")), "imperative: no_hybridize; "
                         "the others: hybridize", group=_AUTHORS))]))}
"""Flags of their scripts that this project does not have, and what replaces each."""


def put_into_our_words(flags: Dict[str, Any]) -> None:
    """Replace the authors' flags by ours; where both are given ours wins."""
    if "mode" in flags:
        flags.setdefault("hybridize", flags.pop("mode") != "imperative")
    threads = flags.pop("num_worker", None)
    dataset = DATASETS.get(flags.get("dataset", ""))
    if threads and dataset and "data_threads" in dataset.options:
        flags.setdefault("data_threads", threads)
