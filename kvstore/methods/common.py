"""Options of every method, and options of methods whose gradients may travel in fewer bytes."""
import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence

from kvstore.errors import ConfigError
from kvstore.messages.codecs import CODECS, THRESHOLD, WITHOUT_RESIDUAL
from kvstore.messages.finite import ON_NAN
from kvstore.options import DEFAULT_TIMEOUT_S, LENGTH, TrainingLength, convert, integer, option, plain, real
from kvstore.options import name as one_of


@dataclass(frozen=True)
class Options:
    """Options of every method."""

    reduction: str = option("mean", one_of("reduction", ("mean", "sum")), "how the gradients of a round are combined: "
                            "mean, or sum as on MXNet's servers (only stores whose rounds have several workers)")
    bucket_nbytes: Optional[int] = option(None, integer(1), "largest bucket, in bytes: weights that are sent as one "
                                          "message", group="Run", otherwise="what suits the transport", result=False)
    timeout_s: float = option(DEFAULT_TIMEOUT_S, real(above=0, at_most=2e6), "longest wait for another process, in "
                              "seconds", group="Run", result=False)
    uneven: str = option("wait", one_of("way", ("wait", "join")), "when the data of one worker end early: wait (the "
                         "others wait for it) or join (it takes part without a gradient until all have ended; "
                         "synchronous stores except sasgd)", group="Run")
    on_nan: str = option("stop", one_of("answer", ON_NAN), "when a gradient or the loss is infinite or not a number: "
                         "stop (end the job and say where), find (the same, and each worker checks all that it sends, "
                         "so that the message names the worker), skip (all workers leave out the round) or continue "
                         "(do nothing)", group="Run", result=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._set(field.name, convert(field, getattr(self, field.name), field.name))
        self.check()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

    def check(self) -> None:
        """ConfigError for options that do not go together; fills in defaults that depend on others."""

    def refuse(self, names: Sequence[str], because: str) -> None:
        """ConfigError if one of these has a value that is not its default."""
        for name in names:
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ConfigError(f"{name} has no meaning {because}")

    def gradient_weight(self, gradients: int) -> float:
        """The weight of one gradient, where this many make one update."""
        return 1.0 / gradients if self.reduction == "mean" else 1.0

    def plain(self) -> Dict[str, Any]:
        """The options as JSON and YAML have them."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def in_iterations(self, batches_per_epoch: Optional[int] = None) -> "Options":
        """The same options, with lengths in iterations where they were in epochs."""
        lengths: Dict[str, Any] = {name: TrainingLength(value.iterations(batches_per_epoch))
                                   for name, value in vars(self).items() if isinstance(value, TrainingLength)}
        return dataclasses.replace(self, **lengths)


CODEC = one_of("codec", tuple(CODECS))


@dataclass(frozen=True)
class CodedOptions(Options):
    """Options of methods whose gradients may travel in fewer bytes."""

    codec: str = option("none", CODEC, "how gradients are sent: none (as they are), float16, bfloat16, truncate (the "
                        "upper 16 bits of each float), quantize (8 bits each and a scale), e3m0 (4 bits each and a "
                        "scale per 256), 2bit or 1bit (MXNet's; what they leave out is sent later)", tunable=True)
    codec_threshold: float = option(THRESHOLD, real(above=0), "with 2bit, elements at least as large are sent as this "
                                    "value; with 1bit, larger elements are sent as 1, others as -1", tunable=True)
    codec_weights: str = option("none", one_of("codec", WITHOUT_RESIDUAL), "how servers send weights: none (as they "
                                "are), or their changes as float16, bfloat16, truncate or quantize", tunable=True)

    def check(self) -> None:
        if self.codec not in CODECS or not CODECS[self.codec].residual:
            self.refuse(["codec_threshold"], f"with codec `{self.codec}`; 2bit and 1bit have one")


def lr_local() -> Any:
    return option(None, real(at_least=0), "learning rate of the local steps", method_specific=True,
                  otherwise="the scheduled global learning rate")


def warmup(iterations: int) -> Any:
    return option(TrainingLength(iterations), LENGTH, "synchronous iterations or epochs before the delay, e.g. 200, or "
                  "2epochs", tunable=True)
