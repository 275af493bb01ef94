"""The agent's process: it finds its orders in its environment or on its standard input."""
import os
import signal
import socket
import sys

from kvstore._version import VERSION
from odsgd.launch.agent.agent import Agent
from odsgd.launch.connections import handshake
from odsgd.launch.messages import Channel, Orders, first_orders

ORDERS_WITHIN_S = 120


def main() -> int:
    """Run the agent to its end."""
    packed = os.environ.pop(handshake.VARIABLE, None)
    try:
        if packed:
            orders, fd = handshake.call_as_told(packed)
            agent = Agent(orders, Channel(fd, fd))
        else:
            signal.alarm(ORDERS_WITHIN_S)  # if the link is cut before they are here, nothing else ends this process
            orders = first_orders(Orders)
            if orders is None:
                sys.exit("odsgd agent: the launcher has gone before saying what to do")
            signal.alarm(0)
            agent = Agent(orders, Channel(0, 1))
    except FileNotFoundError as error:  # of `tempfile`, which names the folders that it has tried
        sys.exit(f"odsgd agent on {socket.gethostname()}: {error.strerror or error}; name another in TMPDIR")
    except OSError as error:
        sys.exit(f"odsgd agent on {socket.gethostname()}: {error}")
    except (LookupError, TypeError, ValueError) as error:
        sys.exit(f"odsgd agent on {socket.gethostname()}: it cannot read its orders ({type(error).__name__}); it is "
                 f"odsgd {VERSION}, and every host needs the version of the launching machine")
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
