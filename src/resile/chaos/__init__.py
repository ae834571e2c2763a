"""Fault injection, for tests, demonstrations and users alike."""
