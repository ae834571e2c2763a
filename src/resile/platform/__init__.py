"""Where nodes run: one port (`port.Platform`), one adapter per place."""
