"""Faults on purpose: the same ones for tests, demonstrations and people."""
