"""What agents, masters, command lines and training processes say to each other: typed values, without any I/O.

A new message goes into the module of the two that exchange it, and into the union at that module's end:
`agent_to_master`, `master_to_agent`, `shards` (training process through agent to master, and back), `commands` (command
line and master), `worker_to_agent` (both directions), `replicas` (agent to agent). `reports` holds the values that
messages carry. The core handles these messages unchanged: no other type repeats their fields.
"""
