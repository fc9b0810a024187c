"""A function: arguments are columns by name, keyword-only ones are options of the scenario.

rewards: {cheap: {use: cheap.py, half: 40}}
"""

import nonet


@nonet.reward
def cheap(events, *, half: float = 40.0):  # [U, W]: how often each item was trained on
    """Return a score that falls with the number of events of an item."""
    return half / (half + events)
