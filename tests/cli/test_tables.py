from __future__ import annotations

import pytest

from resile.cli.output.tables import age, table, took


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0s"),
        (0.4, "0s"),
        (32, "32s"),
        (119, "119s"),
        (120, "2m"),
        (140, "2m20s"),
        (599, "9m59s"),
        (720, "12m"),
        (3 * 3600 + 17 * 60, "3h17m"),
        (4 * 3600, "4h"),
        (19 * 3600 + 5, "19h"),
        (51 * 3600, "2d3h"),
        (40 * 86400, "40d"),
        (3 * 365 * 86400 + 86400, "3y1d"),
        (9 * 365 * 86400, "9y"),
    ],
)
def test_an_age_reads_as_kubectl_prints_it(seconds, words):
    assert age(seconds) == words


def test_columns_are_padded_by_three_spaces_and_the_last_one_not_at_all():
    assert table(("NAME", "PHASE", "AGE"), [("torch-mnist", "Running", "19h")]) == (
        "NAME          PHASE     AGE\ntorch-mnist   Running   19h"
    )


def test_durations_keep_the_digits_that_matter():
    assert [took(s) for s in (0.0124, 0.84, 12.34, 500)] == ["12 ms", "0.84 s", "12.3 s", "8m20s"]
