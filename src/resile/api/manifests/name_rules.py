"""Names that Kubernetes must accept: checked before anything is made, because later they fail one object at a time."""

from __future__ import annotations

import re
from typing import Any

from resile.api.manifests.errors import ManifestErrors, shown, under

MAX_LABEL = 63
"""Of a DNS label and of a label's value (RFC 1123)."""

MAX_OBJECT_NAME = 253
"""Of objects whose names become no label."""

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
OBJECT_NAMES = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*", re.ASCII)


def check_dns_label(value: str, path: str, errors: ManifestErrors) -> None:
    """Names of namespaces and containers."""
    if not _DNS_LABEL.fullmatch(value) or len(value) > MAX_LABEL:
        errors.add(
            path,
            f"must be at most {MAX_LABEL} lower-case letters, digits and '-', "
            f"starting and ending with a letter or digit, not {shown(value)}",
        )


def check_object_name(value: str, path: str, errors: ManifestErrors) -> None:
    """Add an error if this is no valid name of an object. Names that become part of longer names have other checks."""
    if not OBJECT_NAMES.fullmatch(value) or len(value) > MAX_OBJECT_NAME:
        errors.add(
            path,
            f"must be at most {MAX_OBJECT_NAME} lower-case letters, digits, '-' and '.', "
            f"starting and ending with a letter or digit, not {shown(value)}",
        )


def check_labels(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    """Keys and values that Kubernetes takes as labels."""
    for key, item in value.items():
        if not _LABEL_KEY.fullmatch(key) or len(key.rpartition("/")[2]) > MAX_LABEL:
            errors.add(
                under(path, key), "is not a label's key: letters, digits, '-', '_', '.', after an optional prefix/"
            )
        if isinstance(item, str) and (not _LABEL_VALUE.fullmatch(item) or len(item) > MAX_LABEL):
            errors.add(
                under(path, key),
                f"must be at most {MAX_LABEL} letters, digits, '-', '_' and '.', "
                f"starting and ending with a letter or digit, not {shown(item)}",
            )


def check_env_name(value: str, path: str, errors: ManifestErrors) -> None:
    """Names of environment variables that Kubernetes takes."""
    if not _ENV_NAME.fullmatch(value):
        errors.add(path, f"must be letters, digits, '_', '-' and '.', not starting with a digit, not {shown(value)}")
