"""The decisions about a job, as a pure state machine: an event goes in, decisions come out.

Nothing here does I/O, reads a clock, starts a thread, draws a random number or logs. So the same code runs in
production, in three-line tests, in the simulator in virtual time, and from a journal after a crash. Start reading at
`engine`.
"""
