"""``python -m kvstore.server``: serve, or schedule, until the job is over."""
import sys

from kvstore.job import control

control.lean = True

from kvstore.server.roles import main  # noqa: E402  after that

sys.exit(main())
