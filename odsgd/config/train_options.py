"""The options of a training run that are no method's, each with default, kind and meaning; and names of models."""
import dataclasses
import re
from functools import partial
from typing import Any, Dict, Optional, Tuple

import yaml

from kvstore import methods as algorithms
from kvstore.errors import ConfigError, shown
from kvstore.methods import local_optimizers
from kvstore.options import (
    FLAG,
    LARGEST,
    LENGTH,
    PATH,
    TEXT,
    Kind,
    TrainingLength,
    as_text,
    integer,
    integers,
    items,
    name,
    option,
    real,
)
from odsgd.virtual.description import DRAWS, TIME

GLUON_MODELS = tuple("""
alexnet densenet121 densenet161 densenet169 densenet201 inceptionv3
mobilenet0.25 mobilenet0.5 mobilenet0.75 mobilenet1.0
mobilenetv2_0.25 mobilenetv2_0.5 mobilenetv2_0.75 mobilenetv2_1.0
resnet18_v1 resnet34_v1 resnet50_v1 resnet101_v1 resnet152_v1
resnet18_v2 resnet34_v2 resnet50_v2 resnet101_v2 resnet152_v2
squeezenet1.0 squeezenet1.1 vgg11 vgg13 vgg16 vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn
""".split())

GLUONCV_MODELS = tuple("""
cifar_resnet20_v1 cifar_resnet56_v1 cifar_resnet110_v1 cifar_resnet20_v2 cifar_resnet56_v2 cifar_resnet110_v2
cifar_resnext29_16x64d cifar_resnext29_32x4d cifar_wideresnet16_10 cifar_wideresnet28_10 cifar_wideresnet40_8
cifar_residualattentionnet56 cifar_residualattentionnet92 cifar_residualattentionnet452
resnet18_v1b resnet34_v1b resnet50_v1b resnet101_v1b resnet152_v1b
resnet50_v1c resnet101_v1c resnet152_v1c resnet50_v1d resnet101_v1d resnet152_v1d
resnet50_v1e resnet101_v1e resnet152_v1e resnet50_v1s resnet101_v1s resnet152_v1s
resnext50_32x4d resnext101_32x4d resnext101_64x4d se_resnext50_32x4d se_resnext101_32x4d se_resnext101_64x4d
se_resnet18_v1 se_resnet34_v1 se_resnet50_v1 se_resnet101_v1 se_resnet152_v1
se_resnet18_v2 se_resnet34_v2 se_resnet50_v2 se_resnet101_v2 se_resnet152_v2 senet_154
resnest14 resnest26 resnest50 resnest101 resnest200 resnest269
mobilenetv3_small mobilenetv3_large shufflenet_v1 shufflenet_v2 darknet53 googlenet xception
hrnet_w18_c hrnet_w18_small_v1_c hrnet_w18_small_v2_c hrnet_w30_c hrnet_w32_c hrnet_w40_c hrnet_w44_c hrnet_w48_c
residualattentionnet56 residualattentionnet92 residualattentionnet128 residualattentionnet164
""".split())

PAPERS_MODELS = ("mlp_500", "caffe_cifar10", "caffe_cifar10_pixels", "sasgd_cnn", "vgg_f")

MODELS = ("mlp", "lenet", *PAPERS_MODELS, *GLUON_MODELS, *GLUONCV_MODELS)
"""Names of models, MXNet 1.9.1's and GluonCV 0.10.5's among them, so that a misspelt one is refused before any process
of a job starts or anything slow is imported; tests/odsgd/training/test_models.py compares them with what is installed.
"""


# --- kinds of options that only a training run has --------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Compute:
    """How long an emulated accelerator computes per iteration, written ``200ms`` or ``0.2s,lognormal:0.1``.

    `spread` : sigma of the lognormal distribution of that time, whose mean is `seconds`; 0: always the same
    """

    seconds: float
    spread: float = 0.0

    def plain(self) -> str:
        """The value as YAML has it; reading it back gives this Compute."""
        return f"{1000 * self.seconds:.12g}ms" + (f",lognormal:{self.spread:.12g}" if self.spread else "")

    __str__ = plain


def _compute(value: Any) -> Compute:
    if isinstance(value, Compute):
        return value
    time, comma, draws = as_text(value).partition(",")
    seconds, drawn = TIME.convert(time), DRAWS.convert(draws if comma else "constant")
    if not 0 < seconds < LARGEST or drawn.kind not in ("constant", "lognormal"):
        raise ValueError
    return Compute(float(seconds), *drawn.values)


def keyword_value(value: Any) -> Any:
    """A number or truth value where a text is one; YAML 1.1 takes ``1e-4`` for a string, so floats are tried first."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            pass
    return yaml.SafeLoader.bool_values.get(value.strip().lower(), value)


def _keywords(value: Any) -> Dict[str, Any]:
    if isinstance(value, dict):
        if not all(isinstance(one, (str, int, float)) for one in value.values()):
            raise ValueError
        return {str(key): keyword_value(v) for key, v in value.items()}
    pairs = [str(part).partition("=") for part in items(value)]
    if not all(key.strip().isidentifier() and equals for key, equals, _ in pairs):
        raise ValueError
    found: Dict[str, Any] = {}
    for key, _, text in pairs:
        if key.strip() in found:
            raise ConfigError(f"`{shown(key.strip())}` stands twice; leave one of them out")
        found[key.strip()] = keyword_value(text.strip())
    return found


def _umask(value: Any) -> str:
    if not re.fullmatch("0?0[0-7]{2}", as_text(value)):
        raise ValueError
    return str(value)


UMASK = Kind("MASK", "three octal digits, the first 0, e.g. 027", _umask)
COMPUTE = Kind("TIME", "a time (200ms, 0.2s), perhaps with a spread (200ms,lognormal:0.2)", _compute)
KEYWORDS = Kind("K=V,...", "keywords as key=value,key=value", _keywords)
SHAPE = integers(1, length=3, expected="channels,height,width, e.g. 3,32,32")


# --- the options ------------------------------------------------------------------------------------------------------

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
    weights: Optional[str] = _data(None, PATH, "file of initial weights, e.g. a checkpoint's weights.params; a last "
                                   "layer of another shape starts anew", result=False)
    trainable: str = _data("all", name("part", ("all", "last")), "layers that are trained: all, or only the last; the "
                           "others keep their weights and BatchNorm statistics")
    dataset: str = _data("digits", name("data set", tuple(DATASETS)), "data set for training and test")
    data_dir: Optional[str] = _data(None, PATH, "folder with the files of mnist, cifar10 or imagenet", result=False)
    batch_size: int = _data(32, integer(1), "examples per iteration on ONE device; a worker's batch is batch size x "
                            "devices, the global batch is that x workers", tunable=True)
    augment: bool = _data(False, FLAG, "crop and mirror training images at random (cifar10: padded by 4 pixels; "
                          "imagenet: resized crops)")
    image_shape: Optional[Tuple[int, int, int]] = _data(None, SHAPE, "shape of synthetic images or of imagenet's crops",
                                                        otherwise="synthetic 3,32,32; imagenet 3,224,224")
    num_classes: Optional[int] = _data(None, integer(2), "classes of synthetic or imagenet data",
                                       otherwise="synthetic 10; imagenet 1000")
    num_examples: Optional[int] = _data(None, integer(1), "use only the first N training examples; synthetic: make N, "
                                        "and N/4 for the test", otherwise="all; synthetic 2048")
    holdout: Optional[int] = _data(None, integer(1), "use the last N training examples as a validation set, and test "
                                   "on it instead of the test set", otherwise="none")
    thumbnail: bool = _data(False, FLAG, "for small images: a Gluon ResNet or MobileNet begins with a 3x3 convolution "
                            "of stride 1, which is more accurate and 4 to 16 times the work")
    data_threads: Optional[int] = _data(None, integer(1), "number of threads that decode imagenet's images",
                                        otherwise="4", result=False)

    num_gpus: int = _devices(0, integer(0), "use GPUs 0 to N-1", result=False)
    gpus: Tuple[int, ...] = _devices((), integers(0), "use these GPUs, e.g. 0,2", result=False)
    num_cpus: int = _devices(1, integer(1), "without GPUs: use N devices, cpu(0) to cpu(N-1), to try several devices "
                             "on any machine", result=False)
    dtype: str = _devices("float32", name("number type", ("float32", "float16")), "number type of weights, gradients "
                          "and activations. With float16 the loss scale is dynamic, and the store updates in float32; "
                          "a CPU computes products in float32 anyway")
    hybridize: bool = _devices(True, FLAG, "compile the network into one graph")

    kvstore: str = _algorithm("odsgd", TEXT, f"the method: {', '.join(algorithms.METHODS)}; or MXNet's dist_sync "
                              "(odsgd when --optimizer-local is named, else ssgd), dist_async (asgd) and device "
                              "(local)")
    method_file: Optional[str] = _algorithm(None, TEXT, "load your own method from FILE.py or MODULE:CLASS; it is used "
                                            "unless --kvstore names another", result=False)
    transport: Optional[str] = _algorithm(None, name("transport", ("server", "ring", "sharded")), "who sums gradients "
                                          "and updates weights: parameter servers (server), all workers (ring), or "
                                          "each worker a part of the weights (sharded)",
                                          otherwise="the first that the method has", result=False)
    optimizer: str = _algorithm("sgd", name("optimizer", local_optimizers.NAMES), "optimizer of the global weights",
                                tunable=True)
    lr: float = _algorithm(0.1, real(at_least=0), "learning rate of the global weights, before the schedule")
    momentum: float = _algorithm(0.0, real(at_least=0, at_most=1), "momentum of --optimizer", tunable=True)
    wd: float = _algorithm(0.0, real(at_least=0), "weight decay of --optimizer", tunable=True)
    optimizer_params: Dict[str, Any] = _algorithm({}, KEYWORDS, "more arguments of --optimizer, e.g. clip_gradient=5")

    epochs: int = _schedule(10, integer(1), "number of passes over the training data", result=False)
    iterations: Optional[int] = _schedule(None, integer(1), "stop after N iterations, even if epochs are left",
                                          result=False)
    lr_decay: str = _schedule("step", name("decay", ("step", "poly")), "how lr falls: step (by --lr-factor after "
                              "--lr-step-epochs) or poly (quadratically to 0, once --lr-warmup is over)")
    lr_step_epochs: Tuple[int, ...] = _schedule((), integers(1), "multiply lr by --lr-factor after these epochs, e.g. "
                                                "80,120")
    lr_step_epochs_local: Optional[Tuple[int, ...]] = _schedule(None, integers(1), "the same for lr_local",
                                                                otherwise="--lr-step-epochs", method_specific=True)
    lr_factor: float = _schedule(0.1, real(above=0), "factor of the steps of lr and lr_local")
    lr_warmup: TrainingLength = _schedule(TrainingLength(0), LENGTH, "first part of the training, in which lr rises "
                                          "linearly (lr_local does not), e.g. 5epochs", tunable=True)
    lr_scaling: str = _schedule("none", name("scaling", ("none", "linear", "sqrt")), "when a job of -n MIN:MAX has "
                                "fewer than MAX workers: keep lr (none), multiply it by workers / MAX (linear), or by "
                                "the square root of that (sqrt)")
    lr_warmup_from: float = _schedule(0.0, real(at_least=0), "learning rate at the start of --lr-warmup")

    seed: int = _run(0, integer(0), "random seed of weights, data order and augmentation")
    out: Optional[str] = _run(None, PATH, "folder of the run", result=False,
                              otherwise="runs/DATASET-MODEL-STORE-LOCAL-TRANSPORT, without what the run lacks")
    umask: str = _run("077", UMASK, "umask of the run's files and folders: 077 keeps them private, 022 lets others "
                      "read them", result=False)
    resume: bool = _run(False, FLAG, "continue the run in the folder of --out", result=False)
    log_interval: int = _run(50, integer(1), "iterations between two lines of the log", result=False)
    eval_every: int = _run(1, integer(0), "epochs between two evaluations; 0: never", result=False)
    checkpoint_every: TrainingLength = _run(TrainingLength(1, "epochs"), LENGTH, "epochs or iterations between two "
                                            "checkpoints, e.g. 1epoch or 500; 0: one at the end", result=False)
    keep_checkpoints: int = _run(3, integer(1), "how many of the newest checkpoints to keep", result=False)
    checkpoint_to: Optional[str] = _run(None, TEXT, "also copy checkpoints to this folder, or by ssh to HOST:FOLDER, "
                                        "and fetch them from there if --out has none", result=False)
    emulate_compute: Optional[Compute] = _run(None, COMPUTE, "to measure times: computing an iteration takes this long "
                                              "and uses no core; gradients appear layer by layer, with the values of "
                                              "the first batch. Nothing is learned, evaluated or saved")
    board: bool = _run(False, FLAG, "write event files for TensorBoard into the folder of the run", result=False)
    trace: Optional[str] = _run(None, PATH, "write a timeline of the job into this folder, for `odsgd trace` and "
                                "Perfetto", result=False)

    cluster: Optional[str] = _virtual(None, TEXT, "train all workers in this process, in virtual time, on the cluster "
                                      "that this YAML file describes; `virtual`: on a default one", result=False)
    workers: Optional[int] = _virtual(None, integer(1), "number of workers of --cluster",
                                      otherwise="what the file says, or 2", result=False)


_authors = partial(option, group="In the words of the OD-SGD authors' scripts")


@dataclasses.dataclass(frozen=True)
class AuthorsOptions:
    """Flags of their scripts that this project does not have, and what replaces each."""

    num_worker: int = _authors(4, integer(0), "sets data_threads, if the data set has them")
    mode: str = _authors("hybrid", name("mode", ("symbolic", "hybrid", "imperative")), "imperative sets no_hybridize, "
                         "others hybridize")


def put_into_our_words(flags: Dict[str, Any], dataset: str) -> None:
    """Replace the authors' flags by ours; where both are given ours wins."""
    if "mode" in flags:
        flags.setdefault("hybridize", flags.pop("mode") != "imperative")
    threads = flags.pop("num_worker", None)
    if threads and dataset in DATASETS and "data_threads" in DATASETS[dataset].options:
        flags.setdefault("data_threads", threads)
