"""The base of all messages, and the version of the protocol."""

from __future__ import annotations

import msgspec

PROTOCOL = 6
"""The version of the protocol, increased with every change that an older agent or master would misunderstand."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """Base of all messages. The type's name is the tag on the wire and in the journal. An answer is a message too.

    Messages are trees, so the garbage collector need not look for cycles among them (`gc=False`, here and for events
    and decisions). If it did, it would run in the middle of a large rendezvous, and halt the master.
    """
