"""The float32 errors of exact noise (R7), held against the formulas and the figures of docs/privacy.md."""

import math
from fractions import Fraction

import pytest

from dither.accounting import exact

U = Fraction(1, 2**24)


def gamma(operations):
    """Higham's γ: the relative error of so many float32 operations in turn."""
    return operations * U / (1 - operations * U)


def test_operations_in_turn_err_by_highams_bound():
    for operations in (1, 100, 10**6):
        assert exact.accumulated(operations) == pytest.approx(float(gamma(operations)), rel=1e-14)
    assert exact.accumulated(2**23 - 1) == pytest.approx(1.0, rel=1e-6)
    assert exact.accumulated(2**23) == math.inf  # half of all digits, and more, may be lost


@pytest.mark.parametrize("squares", [10, 272, 10**6])
def test_a_norm_errs_by_half_of_its_squares_and_sixteen_roundings_more(squares):
    stated = float(gamma(squares + 4) / 2 + 16 * U)
    assert stated <= exact.norm_error(squares) <= 1.011 * stated


def test_a_norm_in_rows_errs_by_a_row_and_the_number_of_rows():
    assert exact.blocked_norm_error([256, 257, 1]) == exact.norm_error(256 + 1 + 2 + 1)


def test_batches_are_summed_in_blocks_of_whole_places():
    assert [exact.block_size(records) for records in (1, 8, 9, 64, 127, 128, 129, 10**6)] == [
        8, 8, 16, 64, 128, 128, 64, 64
    ]  # fmt: skip


@pytest.mark.parametrize(("records", "stated"), [(64, 0.0005), (200, 0.0017), (512, 0.0046)])
def test_a_sum_errs_as_docs_say(records, stated):
    block = 64
    several = exact.sum_error(records, fixed_places=False)
    assert several == pytest.approx(float(2 * records * gamma(block + math.ceil(records / block) + 4)), rel=1e-12)
    assert several == pytest.approx(stated, abs=5e-5)
    own_block = exact.sum_error(records, fixed_places=True)
    assert own_block == pytest.approx(float(2 * block * gamma(block + 4)), rel=1e-12)
    assert own_block == pytest.approx(0.0005, abs=5e-5)


def test_a_batch_that_is_one_block_errs_by_its_own_records():
    """What fills a block up to whole places is 0, and adding it errs nowhere."""
    for records in (3, 66, 128):
        own = exact.sum_error(records, fixed_places=True)
        assert own == pytest.approx(float(2 * records * gamma(records + 4)), rel=1e-12)
    assert exact.sum_error(128, fixed_places=True) <= 0.0021


def test_the_errors_of_norm_sum_and_noise_multiply():
    both = exact.summed_error(0.01, 200, fixed_places=False)
    assert 1 + both == pytest.approx(1.01 * (1 + exact.sum_error(200, fixed_places=False)) / exact.STD_FACTOR)
    whole = exact.whole_error([300, 7])
    assert 1 + whole == pytest.approx(
        (1 + exact.blocked_norm_error([300, 7])) * (1 + float(gamma(8))) / exact.STD_FACTOR, rel=1e-12
    )
    assert whole > exact.blocked_norm_error([300, 7]) + float(gamma(8))


def test_each_coordinate_of_each_client_pays_for_its_draw():
    alone, summed = exact.noise(100), exact.noise(100, summed=6)
    assert alone.rounding == pytest.approx(10 / exact.WIDTH, rel=1e-6)
    assert alone.rounding > 10 / exact.WIDTH
    assert (alone.distance, alone.failure, alone.sums) == (100 * 2.0**-65, 100 * 2.0**-49, False)
    assert summed.rounding == pytest.approx(10 / exact.SUM_WIDTH, rel=1e-6)
    assert summed.rounding > 10 / exact.SUM_WIDTH
    assert (summed.distance, summed.failure, summed.sums) == (600 * 2.0**-65, 600 * 2.0**-49, True)
