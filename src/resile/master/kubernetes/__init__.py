"""The master's parts that speak to a cluster: spec, ScalePlans and status."""
