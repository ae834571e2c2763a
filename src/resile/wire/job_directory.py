"""A job's directory: how the parts of a job on one machine find each other.

    job.json      the JobSpec                    journal.db   what the master must not forget
    token         the job's secret (mode 0600)   master.json  where the master listens, and its pid
    lock          held by the living master      master.log   the master's log
    nodes/ logs/  what the local platform keeps of each node

The directory is private to its user (mode 0700), because every process that can read it can speak for the job.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from resile.api.job import JobSpec
from resile.common.atomic_files import write_atomically

ALL_INTERFACES = ("", "0.0.0.0", "::")


class DirectoryError(Exception):
    """The directory cannot be used, or has no job; the text is one sentence."""


class MasterAddress(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    pid: int

    @property
    def reachable_host(self) -> str:
        return "127.0.0.1" if self.host in ALL_INTERFACES else self.host


class JobDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.journal = self.path / "journal.db"
        self.log = self.path / "master.log"
        self.token_file = self.path / "token"

    @property
    def exists(self) -> bool:
        return (self.path / "job.json").exists()

    def create(self, spec: JobSpec, token: str | None = None) -> None:
        """Write `spec` and `token` to files of this directory. A file that exists is not changed.

        If `token` is None, a new token is made. Raises DirectoryError if the files cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self.token_file.exists():
                write_atomically(self.token_file, (token or secrets.token_hex(32)).encode(), mode=0o600)
            if not self.exists:
                write_atomically(self.path / "job.json", msgspec.json.format(msgspec.json.encode(spec), indent=1))
        except OSError as error:
            raise DirectoryError(f"cannot keep the job in {self.path}: {os.strerror(error.errno or 0)}") from error

    def spec(self) -> JobSpec:
        try:
            return msgspec.json.decode((self.path / "job.json").read_bytes(), type=JobSpec)
        except FileNotFoundError:
            raise DirectoryError(f"there is no job in {self.path}") from None
        except (OSError, ValueError) as error:
            raise DirectoryError(f"the job in {self.path} cannot be read: {error}") from error

    def token(self) -> bytes:
        try:
            return self.token_file.read_bytes().strip()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise DirectoryError(f"the job's token {self.token_file} cannot be read: {why}") from None

    def address(self) -> MasterAddress | None:
        """The address at which the master listens or last listened; None if no master ever did."""
        try:
            return msgspec.json.decode((self.path / "master.json").read_bytes(), type=MasterAddress)
        except (OSError, ValueError):
            return None

    def announce(self, address: MasterAddress) -> None:
        write_atomically(self.path / "master.json", msgspec.json.encode(address))

    def lock(self) -> int | None:
        """Take the lock of the master. Returns the descriptor that holds the lock; None if another master holds it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def master_lives(self) -> bool:
        descriptor = self.lock()
        if descriptor is None:
            return True
        os.close(descriptor)
        return False
