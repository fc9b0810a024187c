"""The keys of recent popularity (`models/baselines/_recent_popularity.py`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nonet.models.baselines.kinds.base import BaselineSpec
from nonet.options import StrictModel


class RecentPopularityOptions(StrictModel):
    """The keys of recent popularity."""

    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of the training events, the newest ones, that count; by default chosen by validation",
        ),
    ] = None


SPEC = BaselineSpec("nonet.models.baselines._recent_popularity:RecentPopularity", RecentPopularityOptions)
