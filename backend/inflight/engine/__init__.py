"""The device side: one folder an engine, all of them `inflight.core.ports.Engine`."""
