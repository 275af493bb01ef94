"""``python -m kvstore.weights.servers``: serve, or schedule, until the job is over."""
import sys

from kvstore.weights.servers.roles import main

sys.exit(main())
