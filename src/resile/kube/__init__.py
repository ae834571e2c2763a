"""Kubernetes as the rest of resile speaks to it: plain dictionaries in and out.

The only package that knows lightkube and httpx. `client` and `config` import them; the other modules are pure or stand
on `client`, and `kinds`, `events`, `owner_references` and `pod_status` cost nothing to import.
"""
