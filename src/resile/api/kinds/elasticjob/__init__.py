"""DLRover's ElasticJob: its fields, and the names, labels, environment and status that its users rely on."""
