"""The manifests that a cluster needs to run resile, and their kustomize files."""
