"""``python -m kvstore.weights.servers``: serve, or schedule, until the job is over."""
import sys

from kvstore.job import lean

lean.begin()

from kvstore.weights.servers.roles import main  # noqa: E402  after that

sys.exit(main())
