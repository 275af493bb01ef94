"""The options of a training run that are no method's, each with default, kind and meaning."""
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
    """The options as they are given; `TrainConfig` checks how they go together."""

    model: str = _data("mlp", name("model", MODELS),
                       "network: mlp, lenet, one of the papers' (mlp_500, caffe_cifar10, caffe_cifar10_pixels, "
                       "sasgd_cnn, vgg_f), or a name of Gluon's or GluonCV's model zoo, e.g. resnet18_v2")
    weights: Optional[str] = _data(None, PATH, "file of weights to begin with, e.g. a checkpoint's weights.params; a "
                                   "last layer of another shape is drawn anew", result=False)
    trainable: str = _data("all", name("part", ("all", "last")), "which layers learn: all, or only the last; the "
                           "others are frozen, with the statistics of their BatchNorm")
    dataset: str = _data("digits", name("data set", tuple(DATASETS)), "training and test data")
    data_dir: Optional[str] = _data(None, PATH, "folder with the files of mnist, cifar10 or imagenet", result=False)
    batch_size: int = _data(32, integer(1), "examples per iteration on ONE device; a worker's batch is batch size x "
                            "its devices, the global batch that x workers", tunable=True)
    augment: bool = _data(False, FLAG, "random crops and mirror images in training (cifar10: padded by 4; imagenet: "
                          "resized crops)")
    image_shape: Optional[Tuple[int, int, int]] = _data(
        None, SHAPE, "channels,height,width of synthetic images, or the crop of imagenet",
        otherwise="3,32,32 and 3,224,224")
    num_classes: Optional[int] = _data(None, integer(2), "classes of synthetic or imagenet data",
                                       otherwise="10 and 1000")
    num_examples: Optional[int] = _data(None, integer(1), "use only the first N training examples; of synthetic "
                                        "data make N, and N/4 for the test", otherwise="all, and 2048 synthetic ones")
    holdout: Optional[int] = _data(None, integer(1), "keep the last N training examples as a validation set, and "
                                   "report on it instead of the test set", otherwise="none")
    thumbnail: bool = _data(False, FLAG, "for small images, start a Gluon ResNet or MobileNet with a 3x3 convolution "
                            "of stride 1: more accurate, 4 to 16 times the work")
    data_threads: Optional[int] = _data(None, integer(1), "threads that decode imagenet", otherwise="4", result=False)

    num_gpus: int = _devices(0, integer(0), "use GPUs 0 to N-1", result=False)
    gpus: Tuple[int, ...] = _devices((), integers(0), "use these GPUs, e.g. 0,2", result=False)
    num_cpus: int = _devices(1, integer(1), "without GPUs: devices cpu(0) to cpu(N-1), a way to try several devices on "
                             "any machine", result=False)
    dtype: str = _devices("float32", name("number type", ("float32", "float16")), "number type of weights, gradients "
                          "and activations. With float16 the loss scale is dynamic, and the store updates in float32; "
                          "a CPU computes products in float32 anyway")
    hybridize: bool = _devices(True, FLAG, "compile the network into one graph")

    kvstore: str = _algorithm("odsgd", TEXT, f"the method: {', '.join(algorithms.METHODS)}; or MXNet's dist_sync "
                              "(odsgd when --optimizer-local is named, else ssgd), dist_async (asgd) and device "
                              "(local)")
    method_file: Optional[str] = _algorithm(None, TEXT, "a method of your own, as FILE.py or MODULE:CLASS; it "
                                            "runs unless --kvstore names another", result=False)
    transport: Optional[str] = _algorithm(None, name("transport", ("server", "ring", "sharded")), "who sums and "
                                          "updates, if the method allows several: parameter servers, a ring of the "
                                          "workers, or workers that each update a part of the weights",
                                          otherwise="the method's first choice", result=False)
    optimizer: str = _algorithm("sgd", name("optimizer", local_optimizers.NAMES), "optimizer of the global weights",
                                tunable=True)
    lr: float = _algorithm(0.1, real(at_least=0), "learning rate of the global weights, before the schedule")
    momentum: float = _algorithm(0.0, real(at_least=0, at_most=1), "momentum of that optimizer", tunable=True)
    wd: float = _algorithm(0.0, real(at_least=0), "weight decay of that optimizer", tunable=True)
    optimizer_params: Dict[str, Any] = _algorithm({}, KEYWORDS, "further arguments of the optimizer, e.g. "
                                                  "clip_gradient=5")

    epochs: int = _schedule(10, integer(1), "passes over the training data", result=False)
    iterations: Optional[int] = _schedule(None, integer(1), "stop after N iterations, even if epochs are left",
                                          result=False)
    lr_decay: str = _schedule("step", name("decay", ("step", "poly")), "step: by --lr-factor at --lr-step-epochs; "
                              "poly: with the square to 0, over all epochs from the end of --lr-warmup")
    lr_step_epochs: Tuple[int, ...] = _schedule((), integers(1), "multiply lr by the factor after these epochs, e.g. "
                                                "80,120")
    lr_step_epochs_local: Optional[Tuple[int, ...]] = _schedule(None, integers(1), "the same for --lr-local",
                                                                otherwise="--lr-step-epochs", method_specific=True)
    lr_factor: float = _schedule(0.1, real(above=0), "the factor, for lr and lr_local")
    lr_warmup: TrainingLength = _schedule(TrainingLength(0), LENGTH, "raise lr, but not lr_local, linearly over this "
                                          "span, e.g. 5epochs", tunable=True)
    lr_scaling: str = _schedule("none", name("scaling", ("none", "linear", "sqrt")), "in a job of -n MIN:MAX that runs "
                                "with fewer than MAX workers, lr stays (none), or is multiplied by workers / MAX "
                                "(linear) or by its root (sqrt)")
    lr_warmup_from: float = _schedule(0.0, real(at_least=0), "the rate at which --lr-warmup begins")

    seed: int = _run(0, integer(0), "seed of the initial weights, the order of the data, and augmentation")
    out: Optional[str] = _run(None, PATH, "folder of the run", result=False,
                              otherwise="runs/DATASET-MODEL-STORE-LOCAL-TRANSPORT, as far as the run has these")
    umask: str = _run("077", UMASK, "umask of the run's files and folders; the default keeps them private, with 022 "
                      "others may read them", result=False)
    resume: bool = _run(False, FLAG, "go on with the run in the folder of --out", result=False)
    log_interval: int = _run(50, integer(1), "iterations between two log lines", result=False)
    eval_every: int = _run(1, integer(0), "epochs between two evaluations; 0: never", result=False)
    checkpoint_every: TrainingLength = _run(TrainingLength(1, "epochs"), LENGTH, "time between two checkpoints, e.g. "
                                            "1epoch or 500 iterations; 0: one at the end", result=False)
    keep_checkpoints: int = _run(3, integer(1), "how many of the newest checkpoints are kept", result=False)
    checkpoint_to: Optional[str] = _run(None, TEXT, "copy checkpoints there, too, and fetch them back if --out has "
                                        "none: a folder, or HOST:FOLDER by ssh", result=False)
    emulate_compute: Optional[Compute] = _run(
        None, COMPUTE, "to measure times: the passes of an iteration take this long and use no core; gradients appear "
        "layer by layer, with the values of the first batch. Nothing is learned, evaluated or saved")
    board: bool = _run(False, FLAG, "write TensorBoard's event files into the folder of the run", result=False)
    trace: Optional[str] = _run(None, PATH, "write a timeline of the job into this folder, for `odsgd trace` and "
                                "Perfetto", result=False)

    cluster: Optional[str] = _virtual(None, TEXT, "train all workers in this process, on a cluster in virtual time: "
                                      "its YAML file, or `virtual` for the defaults", result=False)
    workers: Optional[int] = _virtual(None, integer(1), "workers of that cluster", otherwise="what the file says, or 2",
                                      result=False)


_AUTHORS = "In the words of the OD-SGD authors' scripts"

AUTHORS = {field.name: field for field in dataclasses.fields(dataclasses.make_dataclass("Authors", [
    ("num_worker", int, option(4, integer(0), "that many data_threads, where the data set has them", group=_AUTHORS)),
    ("mode", str, option("hybrid", name("mode", ("symbolic", "hybrid", "imperative")), "imperative: no_hybridize; "
                         "the others: hybridize", group=_AUTHORS))]))}
"""Flags of their scripts that this project does not have, and what replaces each."""


def put_into_our_words(flags: Dict[str, Any], dataset: str) -> None:
    """Replace the authors' flags by ours; where both are given ours wins."""
    if "mode" in flags:
        flags.setdefault("hybridize", flags.pop("mode") != "imperative")
    threads = flags.pop("num_worker", None)
    if threads and dataset in DATASETS and "data_threads" in DATASETS[dataset].options:
        flags.setdefault("data_threads", threads)
