"""Semantic ids from a file of the user."""

from __future__ import annotations

from nonet.models.tokenizer.kinds.base import TokenizerSpec
from nonet.options import StrictModel


class FileTokenizer(StrictModel):
    """Options of a file of semantic ids."""

    path: str


SPEC = TokenizerSpec(
    "nonet.models.tokenizer.sid_file:encode_items",
    FileTokenizer,
    check="nonet.models.tokenizer.sid_file:check_file",
)
