"""`python -m inflight.testing.fake_worker`: `inflight.worker` with a fake engine on every rank."""

import sys

from inflight.testing.fake_server import load_fake
from inflight.worker import main

if __name__ == "__main__":
    sys.exit(main(load_fake))
