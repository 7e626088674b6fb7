"""Run the worker until a signal ends it; `--help` lists the options."""

from inflight.dynamo.engine import main

if __name__ == "__main__":
    main()
