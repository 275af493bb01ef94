"""Inputs for readers, made with a random number generator that is handed in.

They are of three kinds: the bytes of a good file with parts cut out, doubled and overwritten; pieces that have done
harm to some reader before, in any order; and anything at all. In the suite the generator is hypothesis's own, so that
an input that does harm is made small. At length `at_once` inputs come from one seed, since hypothesis takes longer to
make one than most readers to read it. It then tells of the inputs up to the one that did harm, which is the last.
"""
import json
import string
from random import Random
from typing import Any, Callable, List, Sequence, Tuple, TypeVar

from hypothesis import example, given, note
from hypothesis import strategies as st

T = TypeVar("T")
U = TypeVar("U")
Make = Callable[[Random], T]

at_once = 1
"""Set by `conftest.py`, before the tests are imported."""

PIECES = ["!!int x", "!!float .", "!!bool z", "!!timestamp 2001-99-99", "!!binary é", "!!set {a}", "!!python/none",
          "0x_", "2001-99-99", "9" * 5000, "1:" * 3000 + "1", "[" * 3000, "{a: " * 500, "&a [*a]", "*b", "&x [1,1]",
          "\0", "\x1b[2J", "\ufeff", "²", "１２", "-1", "99999999", "1e999", "nan", "inf", "~", "''", "# ", "\r", "\t",
          "\n", "\u2028", "\x85", "slots=²", "slots=1023", "port=0", "port=99999999", "slots=" + "9" * 5000,
          "a" * 2000, "..", "%", "@", ":", "="]
NUMBERS = [0, 1, -1, 2, 255, 256, 2 ** 31, 2 ** 32 - 1, 2 ** 63, -2 ** 63, 2 ** 64, 10 ** 30, 10 ** 400]
FLOATS = [0.0, -0.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
CHARACTERS = string.printable + "\0\x1b\x7f\x85\xad²é\u200b\u2028\ufeff１\ufffd\uffff\U0001f600\U0010ffff"


def fed(make: Make[T], *known: T) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """The test below with inputs by `make`, and with known ones."""
    def decorate(test: Callable[[T], None]) -> Callable[[], None]:
        def over(inputs: List[T]) -> None:
            for one in inputs:
                note(repr(one))
                test(one)

        over.__name__ = over.__qualname__ = test.__name__
        over.__module__ = test.__module__
        for one in reversed(known):
            over = example([one])(over)
        fed: Callable[[], None] = given(_several(make))(over)
        return fed
    return decorate


def _several(make: Make[T]) -> st.SearchStrategy[List[T]]:
    if at_once == 1:
        return st.randoms(use_true_random=False).map(lambda random: [make(random)])

    def from_seed(seed: bytes) -> List[T]:
        random = Random(seed)
        return [make(random) for _ in range(at_once)]

    return st.binary(min_size=8, max_size=8).map(from_seed)


def binary(most: int) -> Make[bytes]:
    """Up to so many bytes."""
    def made(random: Random) -> bytes:
        return octets(random, random.randint(0, most))
    return made


def octets(random: Random, count: int) -> bytes:
    """So many bytes, each drawn by itself: hypothesis draws large numbers small, so that most would be 0."""
    return bytes(random.choices(range(256), k=count))


def text(most: int) -> Make[str]:
    """Up to so many characters, now and then from all over Unicode, but for halves of surrogate pairs."""
    def made(random: Random) -> str:
        if random.random() < 0.2:
            points = [random.randint(0, 0x10ffff) for _ in range(random.randint(0, most))]
            return "".join(chr(point) for point in points if not 0xd800 <= point < 0xe000)
        return "".join(random.choice(CHARACTERS) for _ in range(random.randint(0, most)))
    return made


def mutated(good: bytes) -> Make[bytes]:
    """`good`, with a few of its parts cut out, doubled, moved or overwritten."""
    def made(random: Random) -> bytes:
        data = bytearray(good)
        for _ in range(random.randint(1, 4)):
            start, length = random.randint(0, len(data)), random.randint(0, 12)
            kind = random.choice("cdwie")
            if kind == "c":
                del data[start:start + length]
            elif kind == "d":
                data[start:start] = data[start:start + length]
            elif kind == "w":
                data[start:start + length] = octets(random, random.randint(0, length))
            elif kind == "i":
                data[start:start] = random.choice(PIECES).encode()
            else:
                del data[start:]
        return bytes(data)
    return made


def one_of(*makes: Make[T]) -> Make[T]:
    """By any of these."""
    return lambda random: random.choice(makes)(random)


def chosen(options: Sequence[T]) -> Make[T]:
    """One of these."""
    return lambda random: random.choice(options)


def both(first: Make[T], second: Make[U]) -> Make[Tuple[T, U]]:
    """One by each."""
    return lambda random: (first(random), second(random))


def words(known: Sequence[str], most: int) -> Make[List[str]]:
    """Up to so many words: known ones, harmful pieces, any at all."""
    word = one_of(chosen(known), chosen(PIECES), text(20))
    return lambda random: [word(random) for _ in range(random.randint(0, most))]


def texts(good: str) -> Make[bytes]:
    """Texts like `good`, and unlike it."""
    lines = good.splitlines()

    def pieced(random: Random) -> bytes:
        pieces = [random.choice(random.choice((PIECES, lines, (": ", " ", "\n", ","))))
                  for _ in range(random.randint(0, 12))]
        return "".join(pieces).encode()

    return one_of(mutated(good.encode()), pieced, binary(300))


def anything(random: Random, depth: int = 3) -> Any:
    """Whatever JSON can say."""
    kind = random.randint(0, 6 if depth else 4)
    if kind == 0:
        return random.choice((None, True, False))
    if kind == 1:
        return random.choice(NUMBERS) if random.random() < 0.5 else random.randint(-2 ** 40, 2 ** 40)
    if kind == 2:
        return random.choice(FLOATS) if random.random() < 0.5 else random.uniform(-1e6, 1e6)
    if kind in (3, 4):
        return text(10)(random)
    inner = [anything(random, depth - 1) for _ in range(random.randint(0, 3))]
    return inner if kind == 5 else {text(5)(random): one for one in inner}


def json_of(random: Random) -> bytes:
    """Anything, written down."""
    return json.dumps(anything(random)).encode()
