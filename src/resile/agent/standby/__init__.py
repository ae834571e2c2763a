"""Warm standbys: interpreters that have imported torch and wait to replace a lost process."""
