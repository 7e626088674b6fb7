"""Programs that measure and print; nothing here is imported by the server."""
