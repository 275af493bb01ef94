"""The options of a training run that are no method's, each with default, kind and meaning."""
from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Dict, Optional, Tuple

from kvstore import methods as algorithms
from kvstore.methods import local_optimizers
from kvstore.options import FLAG, LENGTH, PATH, TEXT, TrainingLength, integer, integers, name, option, real
from odsgd.config.kinds import COMPUTE, KEYWORDS, SHAPE, UMASK, Compute
from odsgd.config.names import MODELS


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """What the name of a data set settles: shape and classes (or their defaults) and the options that go with it."""

    shape: Tuple[int, int, int]
    classes: int
    options: Tuple[str, ...] = ()


DATASETS = {
    "digits": DatasetSpec((1, 8, 8), 10, ("num_examples", "holdout")),
    "mnist": DatasetSpec((1, 28, 28), 10, ("data_dir", "num_examples", "holdout")),
    "cifar10": DatasetSpec((3, 32, 32), 10, ("data_dir", "augment", "num_examples", "holdout")),
    "imagenet": DatasetSpec((3, 224, 224), 1000, ("data_dir", "augment", "image_shape", "num_classes", "data_threads")),
    "synthetic": DatasetSpec((3, 32, 32), 10, ("image_shape", "num_classes", "num_examples")),
}

VIRTUAL = "virtual"

_data, _devices, _algorithm, _schedule, _run, _virtual = (
    partial(option, group=title) for title in ("Model and data", "Devices of a worker", "Algorithm", "Schedule", "Run",
                                               "Virtual time"))


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """As they are given; `TrainConfig` checks how they go together."""

    model: str = _data("mlp", name("model", MODELS),
                       "network: mlp, lenet, one of the papers' (mlp_500, caffe_cifar10, caffe_cifar10_pixels, "
                       "sasgd_cnn, vgg_f), or a name of Gluon's or GluonCV's model zoo, e.g. resnet18_v2")
    weights: Optional[str] = _data(None, PATH, "file of weights to begin with, e.g. a checkpoint's weights.params; a "
                                   "last layer of another shape is drawn anew", result=False)
    trainable: str = _data("all", name("part", ("all", "last")), "which layers learn: all, or the last alone; the "
                           "others are frozen, with the statistics of their BatchNorm")
    dataset: str = _data("digits", name("data set", tuple(DATASETS)), "training and test data")
    data_dir: Optional[str] = _data(None, PATH, "folder with the files of mnist, cifar10 or imagenet", result=False)
    batch_size: int = _data(32, integer(1), "examples per iteration on ONE device; a worker's batch is batch size x "
                            "its devices, the global batch that x workers", tunes=True)
    augment: bool = _data(False, FLAG, "random crops and mirror images in training (cifar10: padded by 4; imagenet: "
                          "resized crops)")
    image_shape: Optional[Tuple[int, int, int]] = _data(
        None, SHAPE, "channels,height,width of synthetic images, or the crop of imagenet",
        otherwise="3,32,32 and 3,224,224")
    num_classes: Optional[int] = _data(None, integer(2), "classes of synthetic or imagenet data",
                                       otherwise="10 and 1000")
    num_examples: Optional[int] = _data(None, integer(1), "the first so many training examples alone; of synthetic "
                                        "ones so many are made, and a quarter as many for the test",
                                        otherwise="all, and 2048 synthetic ones")
    holdout: Optional[int] = _data(None, integer(1), "the last so many training examples are not learned from; they "
                                   "are the test, in place of the test set, to choose options by", otherwise="none")
    thumbnail: bool = _data(False, FLAG, "for small images, start a Gluon ResNet or MobileNet with a 3x3 convolution "
                            "of stride 1: more accurate, 4 to 16 times the work")
    data_threads: Optional[int] = _data(None, integer(1), "threads that decode imagenet", otherwise="4", result=False)

    num_gpus: int = _devices(0, integer(0), "use GPUs 0 to N-1", result=False)
    gpus: Tuple[int, ...] = _devices((), integers(0), "use these GPUs, e.g. 0,2", result=False)
    num_cpus: int = _devices(1, integer(1), "without GPUs: devices cpu(0) to cpu(N-1), a way to try several devices on "
                             "any machine", result=False)
    dtype: str = _devices("float32", name("number type", ("float32", "float16")), "of weights, gradients and what the "
                          "network computes: float16 has a dynamic loss scale, and the store updates in float32; a CPU "
                          "computes products in float32, too")
    hybridize: bool = _devices(True, FLAG, "compile the network into one graph")

    kvstore: str = _algorithm("odsgd", TEXT, f"the method: {', '.join(algorithms.METHODS)}; or MXNet's dist_sync "
                              "(odsgd when --optimizer-local is named, else ssgd), dist_async (asgd) and device "
                              "(local)")
    method_file: Optional[str] = _algorithm(None, TEXT, "a method of your own, as FILE.py or MODULE:CLASS; it is "
                                            "the one that runs, unless --kvstore names another", result=False)
    transport: Optional[str] = _algorithm(None, name("transport", ("server", "ring", "sharded")), "what sums and "
                                          "updates, for a method that runs on several: parameter servers, a ring of "
                                          "the workers, or workers that each update a part of the weights",
                                          otherwise="the method's first choice", result=False)
    optimizer: str = _algorithm("sgd", name("optimizer", local_optimizers.NAMES), "optimizer of the global weights",
                                tunes=True)
    lr: float = _algorithm(0.1, real(at_least=0), "learning rate of the global weights, before the schedule")
    momentum: float = _algorithm(0.0, real(at_least=0, at_most=1), "its momentum", tunes=True)
    wd: float = _algorithm(0.0, real(at_least=0), "its weight decay", tunes=True)
    optimizer_params: Dict[str, Any] = _algorithm({}, KEYWORDS, "further arguments of the optimizer, e.g. "
                                                  "clip_gradient=5")

    epochs: int = _schedule(10, integer(1), "passes over the training data", result=False)
    iterations: Optional[int] = _schedule(None, integer(1), "stop after this many iterations, though epochs are left",
                                          result=False)
    lr_decay: str = _schedule("step", name("decay", ("step", "poly")), "step: by --lr-factor at --lr-step-epochs; "
                              "poly: with the square to 0, over all epochs from the end of --lr-warmup")
    lr_step_epochs: Tuple[int, ...] = _schedule((), integers(1), "multiply lr by the factor after these epochs, e.g. "
                                                "80,120")
    lr_step_epochs_local: Optional[Tuple[int, ...]] = _schedule(None, integers(1), "the same for --lr-local",
                                                                otherwise="--lr-step-epochs", portable=False)
    lr_factor: float = _schedule(0.1, real(above=0), "the factor, for lr and lr_local")
    lr_warmup: TrainingLength = _schedule(TrainingLength(0), LENGTH, "raise lr, and only it, linearly to its value "
                                          "over this span, e.g. 5epochs", tunes=True)
    lr_scaling: str = _schedule("none", name("scaling", ("none", "linear", "sqrt")), "what becomes of lr, which is for "
                                "MAX workers, while a job of -n MIN:MAX has fewer: it stays, or is multiplied by their "
                                "part of MAX, or by its root")
    lr_warmup_from: float = _schedule(0.0, real(at_least=0), "where it starts")

    seed: int = _run(0, integer(0), "of the initial weights, the order of the data, and augmentation")
    out: Optional[str] = _run(None, PATH, "folder of the run", otherwise="runs/DATASET-MODEL-STORE", result=False)
    umask: str = _run("077", UMASK, "what its files and folders do not allow: by default they are this user's alone; "
                      "022: others may read them", result=False)
    resume: bool = _run(False, FLAG, "go on with the run in that folder", result=False)
    log_interval: int = _run(50, integer(1), "iterations between two log lines", result=False)
    eval_every: int = _run(1, integer(0), "epochs between two evaluations; 0: never", result=False)
    checkpoint_every: TrainingLength = _run(TrainingLength(1, "epochs"), LENGTH, "between two checkpoints, e.g. 1epoch "
                                            "or 500; 0: only at the end", result=False)
    keep_checkpoints: int = _run(3, integer(1), "how many of the newest are kept", result=False)
    checkpoint_to: Optional[str] = _run(None, TEXT, "a second place that checkpoints are copied to, and brought back "
                                        "from if --out has none: a folder, or HOST:FOLDER, by ssh", result=False)
    emulate_compute: Optional[Compute] = _run(
        None, COMPUTE, "forward and backward take this time per iteration and no core, gradients appear layer by "
        "layer, with the values of the first batch. For measuring time: nothing is learned, evaluated or kept")
    board: bool = _run(False, FLAG, "write TensorBoard's event files into the folder of the run", result=False)
    trace: Optional[str] = _run(None, PATH, "folder for a timeline of the job, which `odsgd trace` reads and Perfetto "
                                "shows", result=False)

    cluster: Optional[str] = _virtual(None, TEXT, "train all workers in this one process, on a cluster in virtual "
                                      "time: its YAML file, or `virtual` for one with the defaults", result=False)
    workers: Optional[int] = _virtual(None, integer(1), "workers of that cluster", otherwise="what the file says, or 2",
                                      result=False)
