"""The exit codes of a master. They tell its supervisor, or the operator, if a restart can help.

No code is 1 or 2: Python ends with 1 after an uncaught error, and shells and argument parsers use 2 for bad usage. A
master that ends with one of these has not examined its job, and is started again.
"""

from __future__ import annotations

JOB_SUCCEEDED = 0
ALREADY_SERVED = 3
"""Another master serves the job."""
JOB_FAILED = 10
BROKEN = 70
"""`EX_SOFTWARE`: the master found an error in its own state; a restart may help."""
TRY_AGAIN = 75
"""`EX_TEMPFAIL`: the master cannot serve now; a restart may help."""
CANNOT_SERVE = 78
"""`EX_CONFIG`: no master can serve this job."""

FINAL = (JOB_SUCCEEDED, JOB_FAILED, CANNOT_SERVE)
"""The codes after which a restart would change nothing."""
