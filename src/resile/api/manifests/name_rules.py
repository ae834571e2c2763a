"""Checks of names by the rules of Kubernetes, before the first object is created with them."""

from __future__ import annotations

import re
from typing import Any

from resile.api.manifests.errors import ManifestErrors, shown, under

MAX_LABEL = 63
"""The longest DNS label, and the longest value of a label (RFC 1123)."""

MAX_OBJECT_NAME = 253
"""The longest name of an object, if the name is not used as a label."""

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
OBJECT_NAMES = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*", re.ASCII)


def check_dns_label(value: str, path: str, errors: ManifestErrors) -> None:
    """Add an error if `value` is no valid name of a namespace or container."""
    _check(value, _DNS_LABEL, MAX_LABEL, "lower-case letters, digits and '-'", path, errors)


def check_object_name(value: str, path: str, errors: ManifestErrors) -> None:
    _check(value, OBJECT_NAMES, MAX_OBJECT_NAME, "lower-case letters, digits, '-' and '.'", path, errors)


def check_labels(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    for key, item in value.items():
        if not _LABEL_KEY.fullmatch(key) or len(key.rpartition("/")[2]) > MAX_LABEL:
            errors.add(
                under(path, key), "is not a label's key: letters, digits, '-', '_', '.', after an optional prefix/"
            )
        if isinstance(item, str):
            _check(item, _LABEL_VALUE, MAX_LABEL, "letters, digits, '-', '_' and '.'", under(path, key), errors)


def check_env_name(value: str, path: str, errors: ManifestErrors) -> None:
    if not _ENV_NAME.fullmatch(value):
        errors.add(path, f"must be letters, digits, '_', '-' and '.', not starting with a digit, not {shown(value)}")


def _check(value: str, form: re.Pattern[str], longest: int, characters: str, path: str, errors: ManifestErrors) -> None:
    if not form.fullmatch(value) or len(value) > longest:
        allowed = f"at most {longest} {characters}, starting and ending with a letter or digit"
        errors.add(path, f"must be {allowed}, not {shown(value)}")
