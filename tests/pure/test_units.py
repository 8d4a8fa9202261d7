"""Sizes and times: parsed exactly, refused with a hint, shown readably."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from meshwright.core.errors import InputError
from meshwright.core.units import (
    BYTE_UNITS,
    SECOND_UNITS,
    ceil_div,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("72GiB", 72 * 2**30), ("1.5 GB", 1_500_000_000), ("4096B", 4096), (" 2 KiB ", 2048), ("1e3MB", 10**9), ("0B", 0)],
)
def test_sizes_as_people_write_them(text: str, num_bytes: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == num_bytes
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("text", "seconds"), [("3ms", 0.003), ("1.5 s", 1.5), ("2min", 120), ("1h", 3600), ("20us", 2e-5)]
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@quick
@given(st.integers(0, 2**20), st.sampled_from(sorted(BYTE_UNITS)))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * BYTE_UNITS[unit]


@pytest.mark.parametrize("text", ["", "GiB", "seven GiB", "-1GiB", "1,5GiB", "1 2GiB", "nanGiB", "infGiB"])
def test_what_is_no_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=f"'{text}'.*write it like '72GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("parse", [parse_bytes, parse_seconds])
def test_a_number_without_a_unit_is_refused(parse: type) -> None:
    with pytest.raises(InputError, match="'72' has no unit: write it like"):
        parse("72")


@pytest.mark.parametrize("parse", [parse_bytes, parse_seconds])
def test_a_number_too_large_for_a_float_is_refused(parse: type) -> None:
    with pytest.raises(InputError, match="1e999"):
        parse("1e999s" if parse is parse_seconds else "1e999B")


@pytest.mark.parametrize(
    ("text", "meant"), [("72GIB", "GiB"), ("72gib", "GiB"), ("72Gi", "GiB"), ("72kB", "KB"), ("72GiBs", "GiB")]
)
def test_an_unknown_size_unit_names_the_nearest(text: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{meant}'"):
        parse_bytes(text)


def test_an_unknown_time_unit_names_the_valid_ones() -> None:
    with pytest.raises(InputError, match="unknown unit 'days'") as caught:
        parse_seconds("3days")
    assert all(unit in str(caught.value) for unit in SECOND_UNITS)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (72 * 2**30, "72.00 GiB"), (-(2**21), "-2.00 MiB")],
)
def test_bytes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@quick
@given(st.integers(0, 2**50))
def test_shown_bytes_read_back_near(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.005)


@quick
@given(st.sampled_from([2**10, 2**20, 2**30, 2**40]).flatmap(lambda edge: st.integers(edge - 8, edge + 8)))
def test_shown_bytes_stay_under_1024(num_bytes: int) -> None:
    assert float(format_bytes(num_bytes).split()[0]) < 1024


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (2e-5, "20 us"), (0.0123, "12.3 ms"), (1.234, "1.23 s"), (250.4, "250 s"), (-0.5, "-500.0 ms")],
)
def test_seconds_are_shown_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (5, "5 s"), (90, "90 s"), (150, "2.5 min"), (5400, "90 min"), (86400, "24 h")]
)
def test_waits_are_shown_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12"), (1500, "1.5k"), (33.7e6, "33.7M"), (175e9, "175.0B"), (2e12, "2.0T")]
)
def test_counts_are_shown_short(count: float, text: str) -> None:
    assert format_count(count) == text


@quick
@given(st.integers(0, 10**18), st.integers(1, 10**6))
def test_ceil_div_is_the_least_number_of_pieces(numerator: int, denominator: int) -> None:
    pieces = ceil_div(numerator, denominator)
    assert (pieces - 1) * denominator < numerator <= pieces * denominator
