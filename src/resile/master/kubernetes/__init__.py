"""The master's parts that speak to a cluster: spec, plans and status."""
