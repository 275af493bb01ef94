"""SparseLoCo: DiLoCo whose workers send a few of the floats of how far they have come, in two bits, and keep the rest.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706.

As DiLoCo (`diloco`), but of each chunk of 4,096 floats a worker sends the 64 that have come farthest, each as one of
four values. What it has not sent, it adds to what it sends next. That error feedback takes the place of the outer
momentum: a float that moves on in one direction is sent sooner or later, for all the way that it has come.

    paper          code        meaning
    theta          theta       the global weights; what the last exchange brought
    Delta_m        theta - x   worker m's outer gradient
    e_m            residual    its error feedback: what it has not sent. The codec's, on the worker; checkpoints keep it
    beta           beta        what of that is kept from round to round
    TopK, chunk    k           floats of each chunk that are sent; 4,096 to a chunk
    Q              bits        2, or 32: as they are
    alpha          lr_outer    the outer rate

How the loop is cut. The worker's and the server's as in `diloco`; between them the codec (`codecs.Largest`) and
`coded.CodedPush`:

    e_m <- beta e_m + Delta_m                       `CodedPush._encode_with`
    q_m <- Q(TopK(e_m));  e_m <- e_m - q_m          the same; q_m travels
    theta <- theta - alpha 1/M sum_m q_m            `SyncRule.receive`, with floats

A chunk is 4,096 floats of a bucket in its order, the last one filled up with zeros.
Reading: Q has four values per chunk: plus and minus the mean magnitude of those sent that are above their average, and
of those below. A float that has not moved is never sent. With k = 4,096 and 32 bits all travels, e_m stays 0, and this
is `diloco` with the same lr_outer.
Reading: the paper's workers each gather all q_m; here servers add them, and weights come back as they are, or their
changes by `codec_weights`. A q_m is not scaled to the median length.
Deviation: momentum_outer may be given; the paper has none.
Readings of `diloco` hold here. Other workers after a restart (``-n MIN:MAX``): all begin at theta, with e_m = 0.
"""
from dataclasses import dataclass, replace

from kvstore.errors import ConfigError
from kvstore.messages.codecs import Largest
from kvstore.messages.seam import TrafficSettings
from kvstore.methods.diloco import DiLoCo
from kvstore.options import integer, option, real


class SparseLoCo(DiLoCo):
    name = "sparseloco"
    transports = ("server",)

    @dataclass(frozen=True)
    class Options(DiLoCo.Options):
        H: int = option(30, integer(1), "steps of a worker between two exchanges", tunable=True, method_specific=True)
        lr_outer: float = option(1.0, real(at_least=0), "learning rate of the outer step", tunable=True,
                                 method_specific=True)
        momentum_outer: float = option(0.0, real(at_least=0, below=1), "Nesterov's momentum of the outer step",
                                       tunable=True, method_specific=True)
        k: int = option(64, integer(1), "number of floats that a worker sends of each 4,096; it keeps the rest for "
                        "later", tunable=True)
        bits: int = option(2, integer(2), "bits of each float that is sent: 2 or 32", tunable=True)
        beta: float = option(0.95, real(at_least=0, at_most=1), "share of the unsent rest that is kept for the next "
                             "exchange", tunable=True, method_specific=True)

        def check(self) -> None:
            super().check()
            self.refuse(["codec"], "with a store that has its own codec (k, bits)")
            if self.bits not in (2, 32) or self.k > Largest.CHUNK:
                raise ConfigError(f"k is {self.k} and bits is {self.bits}, expected k at most {Largest.CHUNK} and bits "
                                  "2 or 32")
            if self.on_nan == "skip" and not self.sends_all:
                raise ConfigError("on_nan `skip` does not go with a store that looks for the largest floats; take "
                                  f"`stop`, or k {Largest.CHUNK} and bits 32")

        @property
        def sends_all(self) -> bool:
            return (self.k, self.bits) == (Largest.CHUNK, 32)

    def traffic(self, whole: bool) -> TrafficSettings:
        options = self.options
        if options.sends_all:
            return super().traffic(whole)
        kind = "largest" if options.bits == 32 else "largest_2bit"
        return replace(super().traffic(whole), codec=f"{kind}:{options.k}", codec_keeps=options.beta)
