"""The operator: gives every job its master, keeps that master alive, and writes the status of jobs without one.

Everything is level-triggered: `jobs/decisions` and `plans/decisions` decide, as pure functions, by what exists now and
never by which event was seen. So a restarted operator catches up by reconciling. The master decides about everything
inside its job.
"""
