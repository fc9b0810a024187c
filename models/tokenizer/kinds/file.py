"""The tokenizer kind `file`, which reads semantic ids from a file that the user provides."""

from __future__ import annotations

from nonet.models.tokenizer.kinds.base import TokenizerSpec
from nonet.options import StrictModel


class FileTokenizer(StrictModel):
    """Options of the tokenizer kind `file`.

    Attributes:
        path: Path of the file with semantic ids.
    """

    path: str


SPEC = TokenizerSpec(
    "nonet.models.tokenizer.sid_file:encode_items",
    FileTokenizer,
    check="nonet.models.tokenizer.sid_file:check_file",
    resolve_paths="nonet.models.tokenizer.sid_file:resolve_path",
)
