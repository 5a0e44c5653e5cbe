"""The numbers ToProVAR reads off attention entropy: skewness per scale, spectrum per layer, and two fits.

Source: ToProVAR eq. 3 (rho), eq. 4 (R); defaults where the paper is silent: docs/calibration.md.
"""

from __future__ import annotations

import numpy as np


def singular_values(entropy_map: np.ndarray) -> tuple[float, float]:
    """sigma_1 and sigma_2 of an h x w entropy map, from the eigenvalues of its smaller Gram matrix.

    entropy_map: [h, w], both at least 2, not centred.
    """
    wide = entropy_map.astype(np.float64)
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    largest, second = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1][:2], 0.0))
    return float(largest), float(second)


def singular_ratio(entropy_map: np.ndarray) -> float:
    """sigma_1 / sigma_2 of an h x w entropy map.

    Returns: at least 1; a rank-one map gives the largest ratio float32 can tell, 1e6.
    """
    largest, second = singular_values(entropy_map)
    return float(min(largest / max(second, largest * 1e-6, 1e-300), 1e6)) if largest > 0 else 1.0


def otsu_threshold(values: np.ndarray) -> float:
    """The split of values into two groups with the largest between-group variance, midway between the groups' edges.

    values: [n] finite. Returns: the threshold; the single value if all are equal.
    """
    ordered = np.sort(values.astype(np.float64).ravel())
    if ordered[0] == ordered[-1]:
        return float(ordered[0])
    count = np.arange(1, ordered.size)
    left = np.cumsum(ordered)[:-1] / count
    right = (ordered.sum() - np.cumsum(ordered)[:-1]) / (ordered.size - count)
    spread = count * (ordered.size - count) * (left - right) ** 2
    spread[ordered[1:] == ordered[:-1]] = -1  # never cut between equal values
    cut = int(np.argmax(spread))
    return float((ordered[cut] + ordered[cut + 1]) / 2)


def rank_correlation(values: np.ndarray) -> float:
    """Spearman correlation of a curve with its index; 0 for a constant curve."""
    if values.size < 2:
        return 0.0
    index = np.arange(values.size, dtype=np.float64)
    ranks = np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values], np.float64)
    if ranks.std() == 0:
        return 0.0
    return float(np.corrcoef(index, ranks)[0, 1])


def psnr_db(a: np.ndarray, b: np.ndarray) -> float:
    """PSNR of two uint8 pictures [H, W, 3], in dB; 100 for equal ones."""
    error = float(((a.astype(np.float64) - b.astype(np.float64)) ** 2).mean())
    return 100.0 if error == 0 else float(10 * np.log10(255.0**2 / error))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """SSIM of two uint8 pictures [H, W, 3]: Gaussian window, sigma 1.5, mean over channels (Wang et al. 2004)."""
    from skimage.metrics import structural_similarity

    return float(
        structural_similarity(
            a, b, channel_axis=2, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
    )
