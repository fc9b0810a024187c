"""What callers send and get, as the OpenAPI page shows it. Numbers are finite and sizes bounded before anything is computed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr


def _is_text(text: str) -> str:
    """Return text that UTF-8 can hold: stores, hashes and answers are made of its bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not text that UTF-8 can hold") from None
    return text


Text = Annotated[StrictStr, AfterValidator(_is_text)]
Id = Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | Annotated[Text, Field(max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Asking(_Strict):
    user: Id | None = Field(
        default=None, description="Whose events are read; a user nobody knows is a cold start."
    )
    history: list[Id] | None = Field(
        None, description="Item ids, the newest last, in place of the user's events."
    )
    scene: Annotated[Text, Field(max_length=64)] | None = Field(
        None, description="Where it is asked; it comes back."
    )
    deadline_ms: float | None = Field(default=None, gt=0, le=60_000, description="Then a fall-back answers.")
    explain: bool = Field(
        False, description="Also why: what the model alone says, what the votes say, titles."
    )


class RecommendRequest(_Asking):
    """Who asks, and for how many items."""

    k: int = Field(default=10, description="Items wanted.")
    exclude: list[Id] = Field(
        default_factory=list, max_length=10_000, description="Items that are not listed."
    )
    where: Text | None = Field(default=None, description="A condition over item columns, such as price < 20.")


class ScoreRequest(_Asking):
    """Who asks, and which items are scored."""

    items: list[Id] = Field(description="Items to score.")


class Event(_Strict):
    """One event: an item, when (unix seconds; now), of which kind, and values of the data's columns."""

    item: Id
    time: int | None = None
    event: Text | None = None
    values: dict[Text, Any] | None = None


class EventsRequest(_Strict):
    """New events of a user. A post with an `id` counts once, however often it is sent."""

    user: Id
    events: list[Event]
    id: Annotated[Text, Field(max_length=128)] | None = None


class Scored(BaseModel):
    """An item. score: log-probability in nats, None of a fall-back or of an item that is not recommended."""

    item: int | str
    score: float | None
    title: str | None = None
    own: float | None = Field(default=None, description="Nats of the model without votes.")
    vote: float | None = Field(default=None, description="Share of the votes.")


class Listed(BaseModel):
    """Items, best first. fallback: what answered in place of the model, and `reason` why; None where the model did."""

    items: list[Scored]
    version: int | None
    fallback: str | None = None
    reason: str | None = None
    cold_start: bool = False
    unknown: list[int | str] = Field(default_factory=list, description="Ids that no item has.")
    scene: str | None = None
    history: list[str] | None = Field(
        default=None, description="Titles of the newest events, the newest last."
    )


class Posted(BaseModel):
    """accepted: events that are on disk and in the next answer; `again` where the post's id was taken before."""

    accepted: int
    unknown: list[int | str] = Field(default_factory=list)
    again: bool = False


class Problem(BaseModel):
    """What was wrong, for programs (`kind`) and for people."""

    kind: str
    message: str


class Failure(BaseModel):
    """Every answer that is no success."""

    error: Problem
