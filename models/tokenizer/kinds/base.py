"""The interface of tokenizers: a function from items to codes, and the facts by which a scenario finds it."""

# Shapes: I items, L levels.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nonet.options import StrictModel
from nonet.plugins import PluginRegistry
from nonet.replaceable import Replaceable
from nonet.verbs import ALL_VERBS, SupportedVerbs

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from nonet.samples.sequences import Sequences

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenisedItems:
    """The semantic ids of a catalogue.

    Attributes:
        sids: Semantic ids [I, L] int32, unique.
        codes: Number of codes of every level.
        report: Statistics of the use of the codebooks (`describe_codebooks`).
    """

    sids: np.ndarray
    codes: tuple[int, ...]
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """The input of a tokenizer: the items, the prepared events and the seed.

    Attributes:
        items: The table of the items [I], in the order of the result.
        seq: The prepared events; those outside the train split must not influence the codes.
        seed: Seed of the run.
        folder: The folder that relative paths start from.
        known: The `KnownSids` of the run that weights start from, which items keep; None for a new model.
    """

    items: pa.Table
    seq: Sequences
    seed: int
    folder: Path
    known: Any = None


def _accept_items(items: pa.Table, options: Options, folder: Path) -> None:
    """Accept every table of items: the default of `TokenizerSpec.check`."""


def _keep_options(options: Options, folder: Path) -> Options:
    """Return the options as they are: the default of `TokenizerSpec.resolve_paths`."""
    return options


@dataclass(frozen=True)
class TokenizerSpec:
    """A kind of tokenizer.

    Attributes:
        encode: (request, options) -> codes [I, L] of integers from 0, or the dotted path of that function. A last
            level that distinguishes items with equal codes is added to them. A shipped function may return `TokenisedItems`.
        options: Its keys in a scenario. Plans read `levels` and `codes` if it has them.
        check: (items, options, folder) -> None, or its dotted path; raises ConfigError or DataError before a run
            starts. Where tables are large, `items` has columns and no rows.
        resolve_paths: (options, folder) -> options with absolute paths, or its dotted path; `folder` is that of the scenario.
        list_inputs: (options, folder) -> the local files that `encode` reads besides the items and events, or its dotted path.
            Runs share ids that follow from the same content of these, the same options, seed and data. None, also as a
            result, if that is not known, as of code that may change: every run computes its ids.
        adds_items: Whether new items get codes from the vectors of `options["vectors"]` and the codebooks of known
            items (`nonet items add`).
    """

    encode: str | Callable[[TokenizeRequest, Options], np.ndarray | TokenisedItems]
    options: type[StrictModel] = StrictModel
    check: str | Callable[[pa.Table, Options, Path], None] = _accept_items
    resolve_paths: str | Callable[[Options, Path], Options] = _keep_options
    list_inputs: str | Callable[[Options, Path], Sequence[Path] | None] | None = None
    adds_items: bool = False

    @property
    def verbs(self) -> SupportedVerbs:
        """The verbs that work for runs with the tokenizer."""
        if self.adds_items:
            return ALL_VERBS
        reason = "has no codebooks for new items; give them ids there and start a run with init: {from: RUN}"
        return SupportedVerbs(lacks={"items add": reason})


def _encode_items(request: Any, options: Any) -> Any:
    """Declare the arguments of `TokenizerSpec.encode`."""


TOKENIZERS = PluginRegistry(
    "tokenizer",
    TokenizerSpec,
    "nonet.models.tokenizer.kinds",
    contract={"encode": _encode_items, "check": _accept_items, "resolve_paths": _keep_options},
)


class Tokenizer(Replaceable):
    """The tokenizer that gives items their semantic ids."""

    default: ClassVar[str] = "rq_kmeans"
    registry: ClassVar[PluginRegistry[Any] | None] = TOKENIZERS
