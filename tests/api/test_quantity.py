import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resile.api.ids import GiB, MiB
from resile.api.quantity import ALLOWED, LARGEST, BadQuantity, amount, cores, count, size, write_cores, write_size


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("4Gi", 4 * GiB),
        ("8192Mi", 8 * GiB),
        ("30000Mi", 30000 * MiB),
        ("1.5Gi", 1536 * MiB),
        ("128974848", 128974848),
        ("129e6", 129_000_000),
        ("129M", 129_000_000),
        ("1E3", 1000),
        ("1k", 1000),
        ("128974848000m", 128974848),
        (1024, 1024),
        ("0", 0),
        ("1Ki", 1024),
        ("+1Ki", 1024),
        (".5Ki", 512),
        ("1.", 1),
        (1e20 / 1e4, 10**16),
    ],
)
def test_memory_is_read_in_every_notation_of_kubernetes(text: str | int | float, bytes_: int) -> None:
    assert size(text) == bytes_


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), ("2", 2.0), ("0.5", 0.5), (0.5, 0.5), (2, 2.0), ("100m", 0.1), ("1e-1", 0.1), ("2500000u", 2.5)],
)
def test_cpu_is_read_in_every_notation_of_kubernetes(text: str | int | float, number: float) -> None:
    assert cores(text) == number


def test_fractions_of_a_unit_round_up_so_that_nobody_gets_less_than_asked() -> None:
    assert cores("1500u") == 0.002
    assert size("1m") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 ",
        "4gb",
        "4GiB",
        "1Kb",
        "-1",
        "-500m",
        "1e",
        "e3",
        ".",
        "1,5",
        "0x10",
        "1_000",
        "nan",
        "inf",
        "١",
        "9" * 99,
    ],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(BadQuantity, match=re.escape(f"{ALLOWED}, not ")):
        amount(text)


@pytest.mark.parametrize(
    "number",
    [True, False, -1, -0.5, float("nan"), float("inf"), 2**63, 2**9999],
    ids=lambda number: type(number).__name__,
)
def test_a_number_that_is_no_amount_is_refused(number: int | float) -> None:
    with pytest.raises(BadQuantity):
        amount(number)


def test_more_than_kubernetes_can_hold_is_refused() -> None:
    assert amount(str(LARGEST)) == LARGEST
    with pytest.raises(BadQuantity, match="of at most 8Ei, not '8Ei'"):
        amount("8Ei")
    with pytest.raises(BadQuantity, match="of at most 8Ei"):
        amount("1e99")


def test_a_gpu_cannot_be_divided() -> None:
    assert count("4") == 4
    with pytest.raises(BadQuantity, match="must be a whole number of 0 or more, not '500m'"):
        count("500m")


@given(st.integers(min_value=0, max_value=LARGEST))
def test_a_written_size_reads_back_as_itself(value: int) -> None:
    assert size(write_size(value)) == value


@given(st.integers(min_value=0, max_value=10**9))
def test_written_cores_read_back_as_themselves(thousandths: int) -> None:
    assert cores(write_cores(thousandths / 1000)) == thousandths / 1000


@given(st.integers(min_value=1, max_value=1023), st.sampled_from(["Ki", "Mi", "Gi", "Ti", "Pi"]))
def test_a_size_is_written_with_the_largest_unit_that_is_exact(number: int, unit: str) -> None:
    assert write_size(size(f"{number}{unit}")) == f"{number}{unit}"


@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_a_bad_quantity_and_nothing_else(text: str) -> None:
    with contextlib.suppress(BadQuantity):
        assert amount(text) >= 0
