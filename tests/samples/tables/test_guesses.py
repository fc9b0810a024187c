from __future__ import annotations

import pyarrow as pa

from nonet.samples.tables import OF_INTERACTIONS, OF_ITEMS, guess_by_type, guess_roles, strip_type_suffix


def test_names_are_compared_without_case_blanks_and_recbole_s_types():
    names = ["SessionId", "ItemId", "Time"]
    assert guess_roles(OF_INTERACTIONS, names) == {"user": "SessionId", "item": "ItemId", "time": "Time"}
    names = ["item_id:token", "movie_title:token_seq", "release_year:token"]
    assert guess_roles(OF_ITEMS, names) == {"item": "item_id:token", "title": "movie_title:token_seq"}
    assert strip_type_suffix("movie_title:token_seq") == "movie_title"


def test_a_user_is_rather_a_user_than_a_session_and_what_is_given_wins():
    names = ["session_id", "user_id", "sku", "ts"]
    assert guess_roles(OF_INTERACTIONS, names)["user"] == "user_id"
    assert guess_roles(OF_INTERACTIONS, names, {"user": "session_id"})["user"] == "session_id"


def test_where_no_name_tells_the_only_times_and_the_only_id_left_do():
    schema = pa.schema({"who": pa.int64(), "sku": pa.string(), "when": pa.timestamp("ms"), "x": pa.float64()})
    assert guess_by_type({"item": "sku"}, schema) == {"item": "sku", "time": "when", "user": "who"}
    two = schema.append(pa.field("other", pa.int64()))
    assert "user" not in guess_by_type({"item": "sku"}, two)
    assert guess_by_type({}, schema) == {"time": "when"}
