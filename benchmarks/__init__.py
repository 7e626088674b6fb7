"""Programs that measure and print figures. The server imports nothing from here."""
