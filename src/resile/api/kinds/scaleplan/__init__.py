"""DLRover's ScalePlan: a change to the nodes of a running ElasticJob."""
