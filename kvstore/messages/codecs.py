"""The form in which floats travel: a class for each name in `CODECS`.

A codec is two functions, floats to bytes and back.

With servers (`coded`) each gradient is encoded once by its worker and decoded by the server. A ring encodes a block at
every hop while its partial sums grow, and once more when the sum is whole. The workers then forward these bytes, and
the owner of the block decodes them, too, so that all workers end with the same bits. Codecs that need a residual do not
go with rings.

Errors. Each codec states its error for one encoding of a value x. With servers a sum of p gradients has p such errors.
On a ring each block is encoded p times, x being the partial sums; float32 rounds p - 1 additions in between.
"""
from typing import ClassVar, Dict, Tuple, Type

import numpy as np

THRESHOLD = 0.5  # MXNet's default


class NotFiniteError(ValueError):
    """A block has NaN or infinity, for which its codec has no code."""


class Codec:
    """Floats to bytes and back. An instance belongs to one thread: it may keep room to work in."""

    residual: ClassVar[bool] = False
    """Whether the sender must keep its errors and send them later (`coded.CodedPush`)."""
    coarse: ClassVar[bool] = False
    """Whether it is too coarse to encode sums anew at every hop, or weights."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        """`threshold`: for codecs that have one."""

    def nbytes(self, size: int) -> int:
        """Length of the message for `size` floats."""
        raise NotImplementedError

    def room(self, values: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        """Where the message for `values` is written or received: bytes of `scratch`."""
        return scratch[:self.nbytes(values.size)]

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        """Write the message for `values` (float32) into `message` (uint8)."""
        raise NotImplementedError

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        """Write what `message` stands for into `values`."""
        raise NotImplementedError

    def floats(self, message: np.ndarray, room: np.ndarray) -> np.ndarray:
        """What `message` stands for, in `room` or in place."""
        self.decode(message, room)
        return room


class Plain(Codec):
    """`none`: the floats themselves, sent and received in place; 4 bytes each, no error."""

    def nbytes(self, size: int) -> int:
        return 4 * size

    def room(self, values: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        return values.view(np.uint8)

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        """`message` is `values`."""

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        """`values` is `message`."""

    def floats(self, message: np.ndarray, room: np.ndarray) -> np.ndarray:
        return message.view(np.float32)


class Truncate(Codec):
    """`truncate`: the upper 16 bits, as in Pipe-SGD: sign, exponent and 7 of 23 bits of the mantissa; 2 bytes a float.

    The rest is cut off, not rounded, so every value moves toward zero.

    Error of one encoding: below |x| / 128, or below 2^-133 where |x| < 2^-126. For p workers with gradients x_m: below
    p/128 Σ|x_m|. Infinity stays infinity and NaN stays NaN.
    """

    _shifted = np.empty(0, np.uint32)

    def nbytes(self, size: int) -> int:
        return 2 * size

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        if self._shifted.size < values.size:
            self._shifted = np.empty(values.size, np.uint32)
        bits, upper, shifted = values.view(np.uint32), message.view(np.uint16), self._shifted[:values.size]
        self._shift(bits, shifted)
        np.copyto(upper, shifted, casting="unsafe")
        nan = np.isnan(values)
        if nan.any():  # one whose mantissa lies in the lower bits would come out as infinity
            upper[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)

    @staticmethod
    def _shift(bits: np.ndarray, shifted: np.ndarray) -> None:
        np.right_shift(bits, np.uint32(16), out=shifted)

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        whole = values.view(np.uint32)
        whole[:] = message.view(np.uint16)
        np.left_shift(whole, np.uint32(16), out=whole)


class BFloat16(Truncate):
    """`bfloat16`: the same 16 bits, rounded to the nearest, to even in the middle; 2 bytes a float.

    Error of one encoding: at most |x| / 256, or 2^-134 where |x| < 2^-126. What rounds above the largest is infinity.
    """

    @staticmethod
    def _shift(bits: np.ndarray, shifted: np.ndarray) -> None:
        np.right_shift(bits, np.uint32(16), out=shifted)
        shifted &= np.uint32(1)
        shifted += np.uint32(0x7fff)
        shifted += bits
        shifted >>= np.uint32(16)


class Quantize(Codec):
    """`quantize`: integers from -127 to 127, and in front of them the block's largest magnitude M; 1 byte a float.

    Error of one encoding: at most M/254, half a step, up to rounding (a factor of 1.0001), or M where M < 2^-119. For
    p workers whose gradients lie within ±G: M grows to p G, so at most p (p + 1)/2 · G/254, plus the like of what the
    errors themselves add to M (a factor of 1 + p/254). NaN and infinity raise NotFiniteError.
    """

    LEVELS = np.float32(127)
    SMALLEST = np.float32(2.0 ** -119)  # below it, a step of M/127 would lose its precision
    _scaled = np.empty(0, np.float32)

    def nbytes(self, size: int) -> int:
        return 4 + size

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        if self._scaled.size < values.size:
            self._scaled = np.empty(values.size, np.float32)
        scaled = self._scaled[:values.size]
        largest = self._largest(values, scaled)
        message[:4].view(np.float32)[0] = largest
        if largest < self.SMALLEST:
            message[4:] = 0
            return
        np.multiply(values, self.LEVELS / largest, out=scaled)
        np.rint(scaled, out=scaled)
        np.copyto(message[4:].view(np.int8), scaled, casting="unsafe")

    @staticmethod
    def _largest(values: np.ndarray, room: np.ndarray) -> np.float32:
        """The largest magnitude. Without their signs floats are in the order of their bits, NaN above infinity."""
        bits = np.bitwise_and(values.view(np.int32), np.int32(0x7fffffff), out=room.view(np.int32))
        largest = bits.max(initial=0).view(np.float32)
        if not np.isfinite(largest):
            raise NotFiniteError(f"the codec quantize cannot send {largest}; the gradients have diverged (a smaller "
                                 "learning rate?), or use the codec truncate or none")
        return largest

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        largest = message[:4].view(np.float32)[0]
        values[:] = message[4:].view(np.int8)
        np.multiply(values, largest / self.LEVELS, out=values)


class PowersOfTwo(Codec):
    """`e3m0`, Streaming DiLoCo's: for each block of 256 its largest magnitude M, and for each float 4 bits: the sign,
    and which of 0, M/64, M/32 … M/2, M is nearest. 4.125 bits a float.

    Error of one encoding: at most |x| / 3, or M/128 if that is more, up to rounding; or |x| where M is below 2^-119.
    NaN and infinity raise NotFiniteError.
    """

    coarse = True
    BLOCK = 256
    FLOATS = np.array([[0.0 if not code & 7 else (-1.0 if code & 8 else 1.0) * 2.0 ** ((code & 7) - 7)
                        for code in (byte >> 4, byte & 15)] for byte in range(256)], np.float32)

    def nbytes(self, size: int) -> int:
        return 4 * -(-size // self.BLOCK) + -(-size // 2)

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        blocks = np.zeros((-(-values.size // self.BLOCK), self.BLOCK), np.float32)
        blocks.reshape(-1)[:values.size] = values
        largest = np.abs(blocks).max(axis=1, initial=0)
        if not np.isfinite(largest).all():
            raise NotFiniteError("the codec e3m0 cannot send NaN or infinity; the gradients have diverged (a smaller "
                                 "learning rate?), or use the codec bfloat16 or none")
        largest[largest < Quantize.SMALLEST] = 0
        scales, codes = message[:4 * len(blocks)].view(np.float32), message[4 * len(blocks):]
        scales[:] = largest
        blocks /= np.where(largest, largest, np.float32(np.inf))[:, None]
        bits = blocks.view(np.int32)
        # The exponent of what is rounded to one bit: from 1.5 * 2^k on it is the next one.
        levels = (((bits & 0x7fffffff) + 0x400000) >> 23) - 120
        np.maximum(levels, np.abs(blocks) >= np.float32(2.0 ** -7), out=levels)
        nibbles = (levels | ((bits < 0) & (levels > 0)) * 8).astype(np.uint8).reshape(-1, 2)
        codes[:] = (nibbles[:, 0] << 4 | nibbles[:, 1])[:codes.size]

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        number = -(-values.size // self.BLOCK)
        floats = np.zeros((number, self.BLOCK), np.float32)
        codes = message[4 * number:]
        floats.reshape(-1)[:2 * codes.size] = self.FLOATS[codes].reshape(-1)
        floats *= message[:4 * number].view(np.float32)[:, None]
        values[:] = floats.reshape(-1)[:values.size]


class Float16(Codec):
    """`float16`: half precision, rounded to the nearest; 2 bytes a float.

    Error of one encoding: at most |x| / 2048, or 2^-25 where |x| < 2^-14. From 65520 on it is infinity; NaN stays NaN.
    """

    FLOATS = np.arange(2 ** 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # of every code

    def nbytes(self, size: int) -> int:
        return 2 * size

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        np.copyto(message.view(np.float16), values, casting="same_kind")

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        np.take(self.FLOATS, message.view(np.uint16), out=values, mode="clip")


class _FewBits(Codec):
    """MXNet's gradient compression: codes of a few bits, the first value in the highest bits.

    All values that are sent have the same magnitude; the rest of a value comes with a later message.
    """

    residual = True
    bits: ClassVar[int]

    def __init__(self, levels: Tuple[float, ...]) -> None:
        bytes_ = np.arange(256, dtype=np.uint8)
        shifts = np.arange(8 - self.bits, -1, -self.bits, dtype=np.uint8)
        self._floats = np.array(levels, np.float32)[(bytes_[:, None] >> shifts) & (2 ** self.bits - 1)]

    def nbytes(self, size: int) -> int:
        return -(-size * self.bits // 8)

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        each = 8 // self.bits
        whole = values.size // each
        np.take(self._floats, message[:whole], axis=0, out=values[:whole * each].reshape(whole, each), mode="clip")
        values[whole * each:] = self._floats[message[whole:]].reshape(-1)[:values.size - whole * each]


class TwoBits(_FewBits):
    """`2bit`: the threshold where a value is as large or larger, minus that where it is as small or smaller, else 0.

    A quarter of a byte a float. What one encoding leaves of a value is its residual. NaN is sent as 0, and stays.
    """

    bits = 2

    def __init__(self, threshold: float = THRESHOLD) -> None:
        super().__init__((0.0, 0.0, -threshold, threshold))
        self._threshold = np.float32(threshold)
        self._codes = np.empty((0, 2), np.bool_)

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        if len(self._codes) != values.size:
            self._codes = np.empty((values.size, 2), np.bool_)
        sent, positive = self._codes.T
        np.greater_equal(values, self._threshold, out=positive)
        np.less_equal(values, -self._threshold, out=sent)
        np.logical_or(sent, positive, out=sent)
        message[:] = np.packbits(self._codes)


class OneBit(_FewBits):
    """`1bit`: 1 where a value is above the threshold, else -1. An eighth of a byte a float."""

    bits = 1

    def __init__(self, threshold: float = THRESHOLD) -> None:
        super().__init__((-1.0, 1.0))
        self._threshold = np.float32(threshold)

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        message[:] = np.packbits(values > self._threshold)


class Largest(Codec):
    """`largest:k`, SparseLoCo's: of each chunk of 4,096 floats the k largest, the place of each in 12 bits, and its
    value. What is left out is the residual. With `largest_2bit:k` a value is one of four: the sign, and the mean
    magnitude of the chunk's sent values that are above their average, or of the others.

    No option of a user's: a method sets it (`sparseloco`). NaN and infinity raise NotFiniteError.
    """

    residual = True
    CHUNK = 4096

    def __init__(self, each: int, two_bit_values: bool) -> None:
        self._each, self.two_bit_values = each, two_bit_values
        self._end = -(-self._each * 3 // 2)  # of the places; the values follow
        self._nbytes = self._end + (8 + -(-self._each // 4) if self.two_bit_values else 4 * self._each)

    def nbytes(self, size: int) -> int:
        return -(-size // self.CHUNK) * self._nbytes

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        if not np.isfinite(values).all():
            raise NotFiniteError(f"the {self._each} largest of {self.CHUNK} cannot be found among NaN or infinity; the "
                                 "weights have diverged (a smaller learning rate?)")
        chunks = np.zeros((-(-values.size // self.CHUNK), self.CHUNK), np.float32)
        chunks.reshape(-1)[:values.size] = values
        first = np.argpartition(-np.abs(chunks), self._each - 1, axis=1)[:, :self._each]
        places = np.sort(first, axis=1)
        size = np.abs(np.take_along_axis(chunks, places, axis=1))
        moved = size > 0  # if fewer than k have, the largest is sent again: none of the four values is 0
        places = np.where(moved, places, np.take_along_axis(places, size.argmax(axis=1)[:, None], axis=1))
        sent = np.take_along_axis(chunks, places, axis=1)
        parts = message.reshape(len(chunks), self._nbytes)
        bits = np.unpackbits(places.astype(">u2").view(np.uint8).reshape(len(chunks), self._each, 2), axis=2)[:, :, 4:]
        parts[:, :self._end] = np.packbits(bits.reshape(len(chunks), -1), axis=1)
        if not self.two_bit_values:
            parts[:, self._end:] = sent.view(np.uint8)
            return
        above = np.abs(sent) > _means(size, moved)[:, None]
        levels = [_means(size, moved & which) for which in (~above, above)]
        parts[:, self._end:self._end + 8] = np.stack(levels, axis=1).astype(np.float32).view(np.uint8)
        codes = np.stack([sent < 0, above], axis=2)
        parts[:, self._end + 8:] = np.packbits(codes.reshape(len(chunks), -1), axis=1)

    def decode(self, message: np.ndarray, values: np.ndarray) -> None:
        chunks = np.zeros((-(-values.size // self.CHUNK), self.CHUNK), np.float32)
        parts = message.reshape(len(chunks), self._nbytes)
        bits = np.unpackbits(parts[:, :self._end], axis=1)[:, :12 * self._each].reshape(len(chunks), self._each, 12)
        places = bits @ (1 << np.arange(11, -1, -1))
        if self.two_bit_values:
            levels = np.ascontiguousarray(parts[:, self._end:self._end + 8]).view(np.float32)
            codes = np.unpackbits(parts[:, self._end + 8:], axis=1)[:, :2 * self._each]
            codes = codes.reshape(len(chunks), self._each, 2)
            sent = np.take_along_axis(levels, codes[:, :, 1].astype(np.intp), axis=1) * (1 - 2.0 * codes[:, :, 0])
        else:
            sent = np.ascontiguousarray(parts[:, self._end:]).view(np.float32)
        np.put_along_axis(chunks, places, sent.astype(np.float32), axis=1)
        values[:] = chunks.reshape(-1)[:values.size]


def _means(values: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The mean of each row's values where `which` is true; 0 where it is nowhere."""
    return np.where(which, values, 0).sum(axis=1) / np.maximum(which.sum(axis=1), 1)


CODECS: Dict[str, Type[Codec]] = {"none": Plain, "float16": Float16, "bfloat16": BFloat16, "truncate": Truncate,
                                  "quantize": Quantize, "e3m0": PowersOfTwo, "2bit": TwoBits, "1bit": OneBit}
WITHOUT_RESIDUAL = tuple(name for name, kind in CODECS.items() if not (kind.residual or kind.coarse))


def codec(name: str, threshold: float = THRESHOLD) -> Codec:
    kind, _, number = name.partition(":")
    return Largest(int(number), kind == "largest_2bit") if number else CODECS[name](threshold)
