"""A ring's views of arrays, without a network."""
import pytest

from kvstore.engine._mxnet import mx

pytest.importorskip("mpi4py")


def test_a_method_that_hands_in_another_array_every_time_keeps_few_alive() -> None:
    from kvstore.transports.ring import Views

    views, arrays = Views(8), [mx.nd.full(5, number) for number in range(100)]
    for number, array in enumerate(arrays):
        assert views.of(array).tolist() == [number] * 5
        assert len(views._kept) <= 8
    assert views.of(arrays[-1]) is views.of(arrays[-1])
