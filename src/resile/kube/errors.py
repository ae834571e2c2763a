"""The one error of every call to the API server."""

from __future__ import annotations

import enum
import http
from typing import Any

import msgspec

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, GONE, INVALID = 400, 401, 403, 404, 409, 410, 422
LONGEST_MESSAGE = 1000


class Failure(enum.Enum):
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    GARBLED = "garbled"
    """The answer makes no sense: it came from a proxy, or from an API server that is starting up."""


class KubeError(Exception):
    """A call to the API server failed; the text is one sentence."""

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        failure: Failure = Failure.REFUSED,
        reason: str = "",
        about: str = "",
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.detail = detail or message
        """The cause alone, for a caller that writes its own sentence."""
        self.failure = failure
        self.code = code
        """The HTTP status; 0 if there was no answer or it made no sense."""
        self.reason = reason
        """The API server's name of the error, such as `AlreadyExists`."""
        self.about = about
        """The name of the object that the error is about; empty if it is about none."""

    @property
    def is_absent(self) -> bool:
        """True if the object does not exist. False for a 404 because the API server does not know the kind yet."""
        return self.code == NOT_FOUND and bool(self.about)


def unreachable(error: BaseException) -> KubeError:
    name, said = type(error).__name__, one_line(str(error))
    words = f"{name}: {said}" if said else name
    return KubeError(f"the API server cannot be reached ({words})", failure=Failure.UNREACHABLE, detail=said or name)


def garbled(what: str) -> KubeError:
    return KubeError(f"the API server's answer makes no sense ({one_line(what)})", failure=Failure.GARBLED)


def refused(code: int, body: bytes) -> KubeError:
    """The `KubeError` for an answer with an HTTP status of 300 or more and this body."""
    try:
        said: Any = msgspec.json.decode(body)
    except ValueError:  # no JSON, or no text
        said = None
    return refused_with(said if isinstance(said, dict) else {"message": body.decode(errors="replace")}, code)


def refused_with(status: dict[str, Any], code: int = 0) -> KubeError:
    """The `KubeError` for a Kubernetes `Status` object; `code` is the HTTP status if the object names none."""
    details = status.get("details")
    about = details.get("name") if isinstance(details, dict) else ""
    number = status.get("code")
    code = number if isinstance(number, int) and number else code
    message = one_line(str(status.get("message") or "")) or f"{code} {_phrase(code)}".strip()
    return KubeError(message, code=code, reason=str(status.get("reason") or ""), about=str(about or ""))


def one_line(text: str, longest: int = LONGEST_MESSAGE) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _phrase(code: int) -> str:
    return http.HTTPStatus(code).phrase if code in list(http.HTTPStatus) else ""
