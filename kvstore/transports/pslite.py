"""Parameter servers on MXNet's ps-lite."""
from typing import Any, Dict

from kvstore.engine._mxnet import mx
from kvstore.job.pulse import pulse
from kvstore.messages.buckets import Bucket
from kvstore.transports import connection
from kvstore.transports.buffers import Buffer
from kvstore.transports.servers import ParameterServers


class ParameterServer(ParameterServers):
    """One store on the connection of this process."""

    context = mx.cpu()

    def _join(self, timeout_s: float, synchronous: bool) -> Any:
        return connection.shared(timeout_s, synchronous)

    def _begin_plain(self, messages: Dict[int, Buffer]) -> None:
        self._connection.native.init(list(messages), [message.whole for message in messages.values()])

    def _send_plain(self, bucket: Bucket, send: Buffer) -> None:
        pulse.nbytes += send.nbytes
        self._connection.native.pushpull(bucket.id, send.whole, out=send.whole)
