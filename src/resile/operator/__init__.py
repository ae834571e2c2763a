"""The operator: gives every ElasticJob its master, keeps that master alive, and speaks for jobs that have none.

Everything is level-triggered: what to do follows from what exists now (`decisions`, `plans`: pure), never from which
event was seen, so a restarted operator catches up by looking. What happens inside a job is its master's business.
"""
