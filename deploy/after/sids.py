"""`nonet sids RUN`: what the semantic ids of a finished run are like, and a page with a picture of them.

Good ids use their codes evenly, tell items apart, and give items that people use together the same first codes, because a model
that decodes code by code generalises over what shares a prefix (TIGER, Rajput et al. 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import numpy as np

from nonet.deploy.opened import OpenedRun
from nonet.deploy.report import ReportTable, TableCell, format_number, load_template
from nonet.models.generation import Corpus
from nonet.models.tokenizer import describe_codebooks, number_collisions
from nonet.suggest import make_printable, truncate

# Shapes: I items, L levels, E (item, neighbour) pairs.

_MAX_GROUPS, _MAX_TITLES, _MAX_WORDS = 12, 3, 3  # Groups that are described, and their titles and categories.
_TITLE_WIDTH = 40  # Characters of a title.
_MIN_DRIFTED = 20  # Added items from which their spread over the codes says something.
_WIDTH, _BAND = 1000, 44  # Width of the picture and height of a level, in pixels.
_MIN_WIDTH = 0.3  # Width of the smallest part that is drawn, in pixels.


def describe_sids(opened: OpenedRun) -> dict[str, Any]:
    """Describe the semantic ids of an opened run.

    Returns:
        "run", "items", "levels" (number, whether the last one only numbers collisions, codes, used, perplexity, largest share of
        a code, and the shares of neighbours and of random pairs with equal codes up to this level), "distinct" (share of
        distinct ids before collisions), "largest_collision", "groups" by first code, and "new", the items that were added since.
    """
    corpus = opened.corpus
    has_number = _has_collision_level(corpus.sids)
    own_IL = corpus.sids[:, :-1] if has_number else corpus.sids
    facts = describe_codebooks(corpus.sids, corpus.codes)
    before = describe_codebooks(own_IL, corpus.codes[: own_IL.shape[1]])
    levels = [
        {
            "level": level + 1,
            "collisions": has_number and level == own_IL.shape[1],
            "codes": facts["codes"][level],
            "used": facts["used"][level],
            "perplexity": facts["perplexity"][level],
            "largest": float(np.bincount(corpus.sids[:, level]).max() / len(corpus.sids)),
            **shares,
        }
        for level, shares in enumerate(_compare_prefixes(corpus))
    ]
    return {
        "run": opened.folder.id,
        "items": len(corpus.sids),
        "levels": levels,
        "distinct": before["unique_before_collisions"],
        "largest_collision": before["largest_collision"],
        "groups": list(_describe_groups(corpus)),
        "new": _describe_new_items(corpus, opened.catalogues.get_newest(), own_IL.shape[1]),
    }


def format_sids(facts: Mapping[str, Any]) -> str:
    """Format the result of `describe_sids` as text."""
    lines = [
        f"{facts['items']:,} items: {facts['distinct']:.1%} of the ids are distinct before collisions are numbered, at most "
        f"{facts['largest_collision']} items share one",
        "",
    ]
    lines += _build_level_table(facts).format_lines()
    lines += ["", "largest groups by first code"]
    lines += [
        f"  {group['code']}: {group['items']} items, {group['events']:.1%} of the events: "
        f"{', '.join(group['words'])}{': ' if group['words'] else ''}{' · '.join(group['titles'])}"
        for group in facts["groups"][:5]
    ]
    if new := facts["new"]:
        lines += ["", _format_added(new)]
    return "\n".join(lines)


def _format_added(added: Mapping[str, Any]) -> str:
    """Say in a sentence how the items that were added differ from those of the run."""
    drift = (
        f"; {added['drift']:.1%} would have to change their first code to be spread over the codes as the first items are"
        if added["items"] >= _MIN_DRIFTED
        else ""
    )
    return f"items added: {added['items']:,}; {added['shared']:.1%} share all codes but the number with another item{drift}"


def _build_level_table(facts: Mapping[str, Any]) -> ReportTable:
    """Build the table with a row for each level of the ids."""
    rows: list[list[TableCell | str]] = [
        [
            f"{level['level']}{' (number)' if level['collisions'] else ''}",
            f"{level['used']} of {level['codes']}",
            format_number(level["perplexity"], 1),
            f"{level['largest']:.1%}",
            TableCell(f"{level['neighbours']:.1%}", share=level["neighbours"]),
            f"{level['random']:.1%}",
        ]
        for level in facts["levels"]
    ]
    head = ["level", "codes used", "perplexity", "largest code", "neighbours with this prefix", "by chance"]
    return ReportTable(head, rows)


def render_sids(facts: Mapping[str, Any], corpus: Corpus) -> str:
    """Render the result of `describe_sids`, and a picture of the ids, as a page of HTML."""
    groups = ReportTable(
        ["first code", "items", "events", "categories", "items with most events"],
        [
            [
                str(group["code"]),
                f"{group['items']:,}",
                f"{group['events']:.1%}",
                ", ".join(group["words"]),
                " · ".join(group["titles"]),
            ]
            for group in facts["groups"]
        ],
    )
    return load_template("sids.html").render(
        facts=facts,
        new=_format_added(facts["new"]) if facts["new"] else "",
        levels=_build_level_table(facts),
        groups=groups,
        picture=draw_prefixes(corpus),
    )


def draw_prefixes(corpus: Corpus) -> str:
    """Draw the prefixes of the ids as SVG: a band for each level, where a prefix is as wide as its share of the items."""
    parts, n_levels = [], min(3, corpus.sids.shape[1])
    order_I = np.lexsort(corpus.sids.T[::-1])
    scale = _WIDTH / max(1, len(order_I))
    for level in range(n_levels):
        prefixes = corpus.sids[order_I, : level + 1]
        is_first = np.concatenate([[True], (prefixes[1:] != prefixes[:-1]).any(1)])
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(order_I))
        for number in np.flatnonzero(sizes * scale >= _MIN_WIDTH):
            start, size = starts[number], sizes[number]
            label = f"{' '.join(map(str, prefixes[start]))}: {size} items"
            parts.append(
                f'<rect class="part{number % 2}" x="{start * scale:.1f}" y="{level * _BAND}" width="{size * scale:.1f}" '
                f'height="{_BAND - 3}"><title>{escape(label)}</title></rect>'
            )
    label = f"Prefixes of {len(order_I)} semantic ids, by level"
    return f'<svg viewBox="0 0 {_WIDTH} {n_levels * _BAND}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _has_collision_level(sids_IL: np.ndarray) -> bool:
    """Return whether the last level only numbers the items that share all other codes."""
    return sids_IL.shape[1] > 1 and bool((sids_IL[:, -1] == number_collisions(sids_IL[:, :-1])).all())


def _compare_prefixes(corpus: Corpus) -> Iterator[dict[str, float]]:
    """Yield for each level which share of neighbours, and of random events, have equal codes up to this level.

    Neighbours are pairs of different items that are close in training histories, weighted as the memory counts them.
    """
    transitions = corpus.transitions
    item_E = np.repeat(np.arange(len(transitions)), np.diff(transitions.row))
    other_E, count_E = np.asarray(transitions.item), np.asarray(transitions.count, np.float64)
    count_E = np.where(item_E == other_E, 0.0, count_E)
    occurs_I = np.asarray(transitions.occurs, np.float64)
    prefix_I, is_equal_E = np.zeros(len(corpus.sids), np.int64), np.ones(len(item_E), bool)
    for level in range(corpus.sids.shape[1]):
        code_I = corpus.sids[:, level]
        is_equal_E &= code_I[item_E] == code_I[other_E]
        _, prefix_I = np.unique(prefix_I * (int(code_I.max()) + 1) + code_I, return_inverse=True)
        share = np.bincount(prefix_I, weights=occurs_I) / max(1.0, occurs_I.sum())
        same_item = ((occurs_I / max(1.0, occurs_I.sum())) ** 2).sum()  # which is no pair
        yield {
            "neighbours": float(count_E[is_equal_E].sum() / max(count_E.sum(), 1e-12)),
            "random": float(max(0.0, (share**2).sum() - same_item) / max(1 - same_item, 1e-12)),
        }


def _describe_groups(corpus: Corpus) -> Iterator[dict[str, Any]]:
    """Yield facts about the first codes with most items: their items, share of the events, categories and best known titles."""
    occurs_I, first_I = np.asarray(corpus.transitions.occurs), corpus.sids[:, 0]
    names = corpus.items.column_names
    titles = corpus.items["title" if "title" in names else "item_id"]
    sizes = np.bincount(first_I)
    for code in np.argsort(-sizes, kind="stable")[:_MAX_GROUPS]:
        members = np.flatnonzero(first_I == code)
        if not len(members):
            return
        known = members[np.argsort(-occurs_I[members], kind="stable")]
        words: Counter[str] = Counter()
        if "categories" in names:
            words.update(
                word for row in corpus.items["categories"].take(members).to_pylist() for word in row or ()
            )
        yield {
            "code": int(code),
            "items": len(members),
            "events": float(occurs_I[members].sum() / max(1, occurs_I.sum())),
            "words": [_shorten(word) for word, _ in words.most_common(_MAX_WORDS)],
            "titles": [_shorten(str(title)) for title in titles.take(known[:_MAX_TITLES]).to_pylist()],
        }


def _shorten(title: str) -> str:
    """Return the beginning of a title without control characters."""
    return truncate(make_printable(title), _TITLE_WIDTH)


def _describe_new_items(first: Corpus, newest: Corpus, n_codes: int) -> dict[str, Any] | None:
    """Return facts about the items of the newest catalogue that the first one lacks; None without such items.

    Args:
        first: The corpus with which the run was trained.
        newest: The newest one, which begins with the same items.
        n_codes: Number of levels before collisions are numbered.
    """
    n_first = len(first.sids)
    added = newest.sids[n_first:]
    if not len(added):
        return None
    _, group, sizes = np.unique(newest.sids[:, :n_codes], axis=0, return_inverse=True, return_counts=True)
    shares = [
        np.bincount(codes[:, 0], minlength=newest.codes[0]) / len(codes) for codes in (first.sids, added)
    ]
    return {
        "items": len(added),
        "shared": float((sizes[group.reshape(-1)[n_first:]] > 1).mean()),
        "drift": float(np.abs(shares[0] - shares[1]).sum() / 2),  # total variation distance
    }
