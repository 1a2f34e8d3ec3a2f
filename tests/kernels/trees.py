"""Boosted trees and features drawn at random, for the kernels that add up their leaves."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.scoring.trees import MAX_LEAVES


def draw_trees(generator, num_trees, num_sums, num_features):
    """Trees of any shape, some without a split, as `fit_trees` has them."""
    splits = MAX_LEAVES - 1
    drawn = {
        "feature": generator.integers(0, num_features, (num_trees, splits)).astype(np.int32),
        "threshold": generator.standard_normal((num_trees, splits)).astype(np.float32),
        "path": np.zeros((num_trees, splits, MAX_LEAVES), np.int8),
        "lefts": np.full((num_trees, MAX_LEAVES), -1, np.int8),
        "value": generator.standard_normal((num_trees, MAX_LEAVES)).astype(np.float32),
        "output": generator.integers(0, num_sums, num_trees),
        "level": generator.standard_normal(num_sums),
    }
    for number in range(num_trees):
        paths = [[]]
        for split in range(int(generator.integers(0, splits + 1))):
            path = paths.pop(int(generator.integers(len(paths))))
            paths += [[*path, (split, 1)], [*path, (split, -1)]]
        for leaf, path in enumerate(paths):
            for split, side in path:
                drawn["path"][number, split, leaf] = side
            drawn["lefts"][number, leaf] = sum(side > 0 for _, side in path)
    return {name: torch.from_numpy(values) for name, values in drawn.items()}


def draw_features(generator, windows, trees, num_features=5):
    """Features with no number, an infinite one and one at a threshold, which goes to the left."""
    drawn = generator.standard_normal((windows, num_features)).astype(np.float32)
    features = torch.from_numpy(drawn)
    features[::7, 0], features[::11, 2] = torch.nan, torch.inf
    features[::3, 1] = trees["threshold"][0, 0] if len(trees["threshold"]) else 0.0
    return features
