import pytest


@pytest.fixture(scope="module")
def ranks(forked):
    """Return the results of three ranks of one machine."""
    return forked("local_wire_scenarios.py", 3)


def test_shared_memory_moves_the_bytes_that_gloo_moves(ranks):
    assert [rank["exchanges"] for rank in ranks] == [{"same": 12, "done": 12}] * 3


def test_rows_are_gathered_while_their_senders_still_write_them(ranks):
    assert [rank["streamed"] for rank in ranks] == [12] * 3


def test_rows_trained_through_shared_memory_have_the_bits_of_rows_trained_over_the_network(ranks):
    for rank in ranks:
        assert rank["local"][0] == rank["network"][0]
        assert rank["local"][1]
        assert not rank["network"][1]


def test_a_rank_that_dies_ends_the_others_waits_at_once_and_is_named(ranks):
    for rank in ranks[:2]:
        assert "(no response from rank 2)" in rank["lost"]
        assert "rank 2 closed its connection" in rank["lost"], "seen at once, and not by the group's time-out"


def test_a_shard_that_dies_with_half_an_answer_given_ends_the_trainers_waits(forked):
    half, whole = forked("local_wire_lost_scenarios.py", 3, ended=1)
    assert "the sparse world failed to exchange with the other ranks" in half
    assert "the sparse world failed to exchange with the other ranks" in whole
