"""Listwise: what a beam is worth depends on the others of its list. Here, whether it is the first of its category.

rewards: {spread: {use: spread.py}}
"""

import numpy as np

import nonet


@nonet.reward
def spread(categories, valid):  # [U, W] text and bool, the likeliest beam first
    """Return 1 for the first beam of each category."""
    scores = np.zeros(valid.shape, np.float32)
    for user in range(len(valid)):
        seen = set()
        for beam in np.flatnonzero(valid[user]):
            scores[user, beam] = categories[user, beam] not in seen
            seen.add(categories[user, beam])
    return scores
