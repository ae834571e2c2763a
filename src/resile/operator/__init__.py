"""The operator: gives every job its master, keeps that master alive, and writes the status of jobs without one.

Everything is level-triggered: the pure functions in `jobs/decisions` and `plans` decide by what exists now, never by
which event was seen. So a restarted operator catches up by reconciling. The master decides about everything inside its
job.
"""
