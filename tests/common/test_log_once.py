"""What is said once, and what is said when it changes."""

from __future__ import annotations

import logging

import pytest

from resile.common.log_once import LogOnce, LogOnChange

log = logging.getLogger("resile.test")


def test_each_thing_is_said_once_whatever_its_words(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(log)
    once.say("3 MiB are missing", about="room")
    once.say("4 MiB are missing", about="room")
    once.say("the disk is full", level=logging.ERROR)
    once.say("the disk is full", level=logging.ERROR)
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (logging.WARNING, "3 MiB are missing"),
        (logging.ERROR, "the disk is full"),
    ]


def test_what_stays_wrong_is_said_again_only_after_it_was_well(caplog: pytest.LogCaptureFixture) -> None:
    complaints = LogOnChange(log)
    for words in ("full", "full", "away", "full", "", "full"):
        complaints.say(words)
    assert [each.message for each in caplog.records] == ["full", "away", "full", "full"]
