"""``python -m kvstore.server``: serve, or schedule, until the job is over."""
import sys

from kvstore.server.server import main

sys.exit(main())
