"""What the click models are trained on. It is counted for none of them."""

import numpy as np

USERS, ITEMS, CLICKS, BATCH = 500, 300, 51_200, 256


def clicks():
    """Users, items, and whether the one has clicked the other: a sixth of the users likes a sixth of the items."""
    random = np.random.default_rng(1)
    users, items = random.integers(0, USERS, CLICKS), random.integers(0, ITEMS, CLICKS)
    odds = np.where(users % 6 == items % 6, 0.9, 0.1)
    return users, items, (random.random(CLICKS) < odds).astype(np.float32)
