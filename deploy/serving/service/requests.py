"""The bodies of requests and responses, as the OpenAPI page shows them; sizes are limited, and numbers must be finite."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator


def _check_text(text: str) -> str:
    """Return the text; raise ValueError if UTF-8 cannot encode it, because stores, hashes and answers use its bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not text that UTF-8 can hold") from None
    return text


Text = Annotated[StrictStr, AfterValidator(_check_text)]
Id = Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | Annotated[Text, Field(max_length=512)]

Time = StrictInt | Annotated[Text, Field(max_length=64)]


class _StrictRequest(BaseModel):
    """A body that refuses unknown fields, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Event(_StrictRequest):
    """One event of a user.

    Attributes:
        item: The item's id.
        time: In the unit of the run's log, or ISO 8601 text; by default the current time.
        event: The kind of event.
        values: Values by column of the data.
    """

    item: Id
    time: Time | None = None
    event: Text | None = None
    values: dict[Text, Any] | None = None


class _UserRequest(_StrictRequest):
    """The fields that requests to list and to score items have in common."""

    user: Id | None = Field(
        default=None, description="The user whose events are read; an unknown user is a cold start."
    )
    history: list[Id | Event] | None = Field(
        None,
        description="Item ids, newest last, or events as in /events, to use instead of the user's events.",
    )
    like: list[Annotated[Text, Field(max_length=512)]] | None = Field(
        None, max_length=100, description="Titles of items, newest last, to use instead of `history`."
    )
    time: Time | None = Field(
        None,
        description="Time of the request in the unit of the run's log, or ISO text; by default the current time.",
    )
    scene: Annotated[Text, Field(max_length=64)] | None = Field(
        None, description="Name of one of the run's scenes, returned with the answer."
    )
    deadline_ms: float | None = Field(
        default=None, gt=0, le=60_000, description="Milliseconds after which a fallback answers."
    )
    explain: bool = Field(
        False,
        description="Whether to add titles, scores of the model without votes, and shares of the votes.",
    )


class RecommendRequest(_UserRequest):
    """A request to list items for a user."""

    k: int = Field(default=10, description="Number of items.")
    exclude: list[Id] = Field(
        default_factory=list, max_length=10_000, description="Items that must not be listed."
    )
    where: Text | None = Field(default=None, description="Condition over item columns, such as price < 20.")


class ScoreRequest(_UserRequest):
    """A request to score items for a user."""

    items: list[Id] = Field(description="Items to score.")
    values: dict[Text, Any] | None = Field(
        None, description="Values of the request by column of the data, which click models read."
    )


class EventsRequest(_StrictRequest):
    """New events of a user. A post with an `id` counts once, however often it is sent."""

    user: Id
    events: list[Event] = Field(description="Events, or item ids as events of the present.")

    @field_validator("events", mode="before")
    @classmethod
    def _expand_ids(cls, events: Any) -> Any:
        """Make an event of each item id."""
        if not isinstance(events, list):
            return events
        return [{"item": event} if isinstance(event, int | str) else event for event in events]

    id: Annotated[Text, Field(min_length=1, max_length=128)] | None = None


class Scored(BaseModel):
    """A listed or scored item of a response.

    Attributes:
        item: The item's id.
        score: Log-probability in nats, or the probability of a click by a click model; None in an answer by a
            fallback, or for an item that is not recommended.
        title: The item's title, if `explain` was requested.
    """

    item: int | str
    score: float | None
    title: str | None = None
    own: float | None = Field(
        default=None, description="Log-probability of the model without votes, in nats."
    )
    vote: float | None = Field(default=None, description="Share of the votes.")
    tasks: dict[str, float | None] | None = Field(
        default=None, description="Probability of each further task of a click model, by name."
    )


class Listed(BaseModel):
    """The answer to a request to list or to score items.

    Attributes:
        items: Items, best first; scored ones in the order of the request.
        version: The number of the version that answered; None for a fallback.
        fallback: The fallback that answered; None if the model did.
        reason: Why a fallback answered.
        cold_start: Whether no event of the user is known.
        missing: Joins whose store did not answer; their columns had missing values.
        scene: The request's scene.
    """

    items: list[Scored]
    version: int | None
    fallback: str | None = None
    reason: str | None = None
    cold_start: bool = False
    unknown: list[int | str] = Field(default_factory=list, description="Ids that no item has.")
    missing: list[str] = Field(default_factory=list)
    scene: str | None = None
    history: list[str] | None = Field(
        default=None, description="Titles of the newest events, the newest last."
    )


class Posted(BaseModel):
    """The answer to a post of events.

    Attributes:
        accepted: Number of events that are on disk and used by the next answer.
        unknown: Ids that no item has; their events are not stored.
        again: Whether a post with the same id was stored before, so that nothing was stored.
    """

    accepted: int
    unknown: list[int | str] = Field(default_factory=list)
    again: bool = False


class Problem(BaseModel):
    """An error: `kind` is for programs, `message` for people."""

    kind: str
    message: str


class Failure(BaseModel):
    """The body of every response that is not a success."""

    error: Problem
