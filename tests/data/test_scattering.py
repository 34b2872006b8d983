"""The scattering transform: features of each picture by itself, in [0, 1], that see edges and their direction."""

import numpy as np
import pytest

from dither.data.transforms import scattering
from dither.errors import DataError


def test_features_follow_from_one_picture_and_stay_in_bounds():
    pictures = np.random.default_rng(0).random((600, 12, 16)).astype(np.float32)
    features = scattering(pictures, angles=4)
    assert features.shape == (600, (1 + 2 * 4 + 4**2) * 3 * 4)
    assert features.dtype == np.float32
    assert -1e-5 < features.min() < features.max() <= 1 + 1e-5
    np.testing.assert_allclose(scattering(pictures[599:], angles=4)[0], features[599], atol=1e-6)


def test_flat_pictures_have_their_brightness_and_no_waves():
    features = scattering(np.full((1, 28, 28), 0.5), angles=2).reshape(-1, 49)
    np.testing.assert_allclose(features[0], 0.5, atol=1e-5)
    np.testing.assert_allclose(features[1:], 0.0, atol=1e-5)


def test_stripes_are_seen_by_the_wavelets_across_them():
    stripes = np.tile((np.arange(28) % 4 < 2)[:, None], (1, 28)).astype(np.float32)
    across, along = scattering(np.stack([stripes, stripes.T]), angles=2).reshape(2, -1, 49).mean(2)[:, [1, 2]]
    assert across[0] > 3 * across[1]
    assert along[1] > 3 * along[0]


def test_other_shapes_are_refused():
    with pytest.raises(DataError, match="multiples of 4"):
        scattering(np.zeros((2, 27, 28)))
