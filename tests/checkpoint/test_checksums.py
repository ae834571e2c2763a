"""The agent's own checksums are torch's."""

from __future__ import annotations

import os

import pytest
import torch

from resile.checkpoint.checksums import sums_of, word_sum
from resile.checkpoint.layout import CHUNK
from tests.checkpoint.buffers import filled, layout_of


@pytest.mark.parametrize("words", [1, 2, 3, 1000, CHUNK // 8 - 1, CHUNK // 8])
def test_words_are_added_as_torch_adds_them(words: int) -> None:
    data = bytearray(os.urandom(8 * words))
    assert word_sum(data) == int(torch.frombuffer(data, dtype=torch.int64).sum())
    assert word_sum(b"\xff" * 8 * words) == -words
    assert word_sum(memoryview(b"\0" * 8 * words)) == 0


def test_every_chunk_of_a_buffer_has_one() -> None:
    buffer, record = filled(layout_of(), step=3)
    assert sums_of(buffer.map(), record.data_at, layout_of()) == [word_sum(b"\3" * CHUNK)] * 2
