"""The operator: gives every job its master, keeps that master alive, and writes the status of jobs without one.

Everything is level-triggered: what to do follows from what exists now (`jobs/decisions`, `plans/decisions`: pure),
never from which event was seen, so a restarted operator catches up by reconciling. What happens inside a job is its
master's business.
"""
