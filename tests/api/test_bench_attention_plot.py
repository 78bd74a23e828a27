"""The picture of the attention bench on a GPU: drawn from the metrics alone, with peers or without."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from ramet.api.bench_attention_plot import plot_report

OURS = {"A_us": 50.0, "A_share": 0.7, "64x1k_us": 60.0, "64x1k_share": 0.9}


@pytest.mark.parametrize("peers", [{}, {"A_fa3 cascade_us": 80.0, "64x1k_fa3_us": 70.0}])
def test_a_picture_with_peers_or_without(tmp_path: Path, peers: dict[str, float]) -> None:
    plot_report({**OURS, **peers}, tmp_path / "picture.png", ["64x1k"], ["A"])
    pixels = imread(tmp_path / "picture.png")
    assert pixels.shape[0] > 500 and pixels.shape[1] > 500
    assert 0.02 < (pixels[..., :3].min(axis=-1) < 0.9).mean() < 0.9, "neither empty nor full"
