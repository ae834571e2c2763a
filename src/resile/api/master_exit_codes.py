"""The exit codes by which a master tells its supervisor, or the operator, whether another start can help.

None of them is 1 or 2: the one is what Python gives for an error that nothing caught, the other what shells and
argument parsers give for words that they do not understand. Neither comes from a master that has looked at its job,
and a master that ends with one of them is started again.
"""

from __future__ import annotations

JOB_SUCCEEDED = 0
ALREADY_SERVED = 3
"""Another master serves the job."""
JOB_FAILED = 10
BROKEN = 70
"""`EX_SOFTWARE`: the master found itself broken, and another one may do better."""
TRY_AGAIN = 75
"""`EX_TEMPFAIL`: what kept the master from serving may pass."""
CANNOT_SERVE = 78
"""`EX_CONFIG`: no master can serve this job."""

FINAL = (JOB_SUCCEEDED, JOB_FAILED, CANNOT_SERVE)
"""Another start would change nothing."""
