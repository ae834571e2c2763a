"""Reads manifests: from YAML text to checked, typed resources, with one sentence for every error."""
