"""Twenty-one masks and the predicates they must equal, over random batches.

Predicates are loops over (query, key) or the publisher's own formula, and share no code with the masks. A maker gives
(mask, query lengths, key lengths, seen(sequence, query, key)).
"""

import torch

from nonet.attention.masks.mask import UniMask


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def block_diagonal(lengths_q, lengths_k, seen):
    """[T, S] from seen(b, row, key) -> bool."""
    out = torch.zeros(sum(lengths_q), sum(lengths_k), dtype=torch.bool)
    at_q = at_k = 0
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(n_q):
            for j in range(n_k):
                out[at_q + i, at_k + j] = bool(seen(b, i, j))
        at_q, at_k = at_q + n_q, at_k + n_k
    return out


def lengths_of(r):
    return [r.choice([0, 1, 2, 3, r.randint(0, 14), r.randint(0, 14)]) for _ in range(r.randint(1, 3))]


def targets_of(r, lengths):
    """Numbers of targets from 0 to n, the edges n and n - 1 often."""
    return [r.choice([0, n, max(n - 1, 0), r.randint(0, n)]) for n in lengths]


def either(r, numbers):
    """Return the numbers as a tensor; if all are equal, sometimes as one int."""
    return numbers[0] if len(set(numbers)) == 1 and r.random() < 0.5 else torch.tensor(numbers)


def cuts_within(r, lengths):
    """Packed cuts of random segments; every sequence's end is one, except where a segment spans two now and then."""
    out, at = {0}, 0
    for n in lengths:
        out |= {at + r.randint(0, n) for _ in range(r.randint(0, 3))}
        at += n
        if r.random() < 0.8:
            out.add(at)
    return torch.tensor(sorted(out | {at}))


def segment(cut, token):
    return sum(1 for c in cut.tolist()[1:] if c <= token)


def full(r):
    q, k = lengths_of(r), None
    k = [r.randint(0, 9) for _ in q]
    return UniMask.full(), q, k, lambda b, i, j: True


def causal(r):
    n = lengths_of(r)
    return UniMask.causal(), n, n, lambda b, i, j: j <= i


def causal_bottom_right(r):
    q = lengths_of(r)
    k = [r.randint(0, 14) for _ in q]
    return UniMask.causal(), q, k, lambda b, i, j: j <= i + (k[b] - q[b])


def prefix_lm(r):
    n = lengths_of(r)
    prefix = targets_of(r, n)
    return UniMask.prefix_lm(either(r, prefix)), n, n, lambda b, i, j: j < prefix[b] or j <= i


def window(r):
    n, left, right = lengths_of(r), r.randint(0, 6), r.choice([0, r.randint(0, 6)])
    return UniMask.window(left, right), n, n, lambda b, i, j: i - left <= j <= i + right


def causal_window(r):
    n, w = lengths_of(r), r.randint(1, 7)
    return UniMask.causal(window=w), n, n, lambda b, i, j: i - w < j <= i


def sinks_window(r):
    n, g, w, rows = lengths_of(r), r.randint(0, 5), r.randint(0, 6), r.random() < 0.5
    mask = UniMask.sinks_window(g, w, sinks_see_all=rows)
    return mask, n, n, lambda b, i, j: (j <= i and (j < g or i - w < j)) or (rows and i < g)


def document(r):
    n, causal = lengths_of(r), r.random() < 0.5
    cut, base = cuts_within(r, n), cuts(n)
    mask = UniMask.document(cut, causal=causal)
    same = lambda b, i, j: segment(cut, base[b] + i) == segment(cut, base[b] + j)  # noqa: E731
    return mask, n, n, lambda b, i, j: same(b, i, j) and (j <= i or not causal)


def candidates(r):
    n = lengths_of(r)
    t = targets_of(r, n)
    seen = lambda b, i, j: j == i or (j < n[b] - t[b] and (i >= n[b] - t[b] or j <= i))  # noqa: E731
    return UniMask.hstu(either(r, t)), n, n, seen


def target_groups(r):
    n, g = lengths_of(r), r.randint(1, 4)
    t = targets_of(r, n)

    def seen(b, i, j):
        h = n[b] - t[b]
        if i < h:
            return j <= i
        return j < h or ((i - h) // g == (j - h) // g and j <= i)

    return UniMask.target_groups(either(r, t), g), n, n, seen


def meta_hstu(n, t, c, length, full):
    """generative-recommenders, ops/pytorch/pt_hstu_attention.py::_get_valid_attn_mask, causal, one sequence."""
    ids = torch.arange(n)
    top = n
    if c > 0:
        ids = (ids - c + 1).clamp(min=0)
        top = top - c + 1
    top = top - t
    ids = ids.clamp(max=top)
    row, col = ids[:, None], ids[None]
    distance = row - col
    valid = torch.eye(n, dtype=torch.bool) | (distance > 0)
    if length > 0:
        near = distance <= length
        if full > 0:
            near = near | (row >= top - full)
        valid = valid & near
    if c > 0:
        valid = valid | ((row == 0) & (col < top))
    return valid


def hstu(r, c=None, length=None, full=None):
    n = lengths_of(r)
    t = targets_of(r, n)
    c = [r.choice([0, 1, r.randint(0, 6)]) for _ in n] if c is None else [c] * len(n)
    length = r.randint(0, 8) if length is None else length
    full = r.choice([0, r.randint(0, 6)]) if full is None else full
    mask = UniMask.hstu(either(r, t), contextual=either(r, c), max_attn_len=length, min_full_attn_len=full)
    want = [meta_hstu(n[b], t[b], c[b], length, full) for b in range(len(n))]
    return mask, n, n, lambda b, i, j: want[b][i, j]


def hstu_contextual(r):
    return hstu(r, c=r.randint(1, 4), length=0, full=0)


def hstu_window(r):
    return hstu(r, c=0, length=r.randint(1, 8), full=0)


def semi_local(r):
    n, local, prefix = lengths_of(r), r.randint(0, 6), r.randint(0, 6)
    return UniMask.semi_local(local, prefix), n, n, lambda b, i, j: j <= i and (i - j < local or j < prefix)


def beam_tree(r):
    w, levels = r.randint(1, 4), r.randint(1, 3)
    h = [r.randint(0, 6) for _ in range(r.randint(1, 3))]
    n = [x + w * levels for x in h]
    shared = r.random() < 0.3
    parents = torch.tensor(
        [[[r.randrange(w) for _ in range(w)] for _ in range(levels - 1)] for _ in h]
    ).reshape(len(h), levels - 1, w)
    given = parents[0] if shared else parents

    def seen(b, i, j):
        if j < h[b]:
            return j <= i
        if i < h[b]:
            return False
        level, beam = divmod(i - h[b], w)
        while True:
            if j == h[b] + level * w + beam:
                return True
            if level == 0:
                return False
            beam, level = int(parents[0 if shared else b][level - 1][beam]), level - 1

    return UniMask.beam_tree(either(r, h), given), n, n, seen


def session(r):
    n = lengths_of(r)
    cut, base, prefix = cuts_within(r, n), cuts(n), targets_of(r, n)
    if r.random() < 0.4:
        prefix = [0 for _ in n]
    mask = UniMask.session(cut, prefix=0 if not any(prefix) else either(r, prefix))
    same = lambda b, i, j: segment(cut, base[b] + i) == segment(cut, base[b] + j)  # noqa: E731
    return mask, n, n, lambda b, i, j: j <= i and (same(b, i, j) or j < prefix[b])


def classes(r):
    n, causal = lengths_of(r), r.random() < 0.5
    word = lambda: r.choice([0, 1, 2, 3, 5, -(2**31), 2**31 - 1])  # noqa: E731
    sees, words, base = [word() for _ in range(sum(n))], [word() for _ in range(sum(n))], cuts(n).tolist()
    mask = UniMask.classes(torch.tensor(sees), torch.tensor(words))
    mask = mask & UniMask.causal() if causal else mask
    return mask, n, n, lambda b, i, j: (sees[base[b] + i] & words[base[b] + j]) and (j <= i or not causal)


def bos_interval(r):
    n, p = lengths_of(r), r.randint(1, 5)
    return UniMask.bos_interval(p), n, n, lambda b, i, j: j <= i and not ((j + 1) % p == 0 and i >= j + p)


def cross(r):
    q = lengths_of(r)
    k, strict = [r.randint(0, 9) for _ in q], r.random() < 0.5
    t_q = [[r.randint(0, 9) for _ in range(n)] for n in q]
    t_k = [sorted(r.randint(0, 9) for _ in range(n)) for n in k]
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.int64)  # noqa: E731
    mask = UniMask.cross(flat(t_q), flat(t_k), strict=strict)
    return mask, q, k, lambda b, i, j: t_k[b][j] < t_q[b][i] or (t_k[b][j] == t_q[b][i] and not strict)


def intervals(r):
    n, slots = lengths_of(r), r.randint(1, 4)
    start = torch.tensor([[r.randint(-2, 9) for _ in range(slots)] for _ in range(sum(n))]).reshape(-1, slots)
    stop = start + torch.tensor([[r.randint(-2, 6) for _ in range(slots)] for _ in start.tolist()]).reshape(
        -1, slots
    )
    base = cuts(n)

    def seen(b, i, j):
        row = base[b] + i
        return any(s <= j < e for s, e in zip(start[row].tolist(), stop[row].tolist(), strict=True))

    return UniMask.intervals(start, stop), n, n, seen


def stochastic_length(r):
    """Not a mask: the history is sampled first, the cuts rebuilt, and the base mask is that of what is left."""
    n = [r.randint(0, n) for n in lengths_of(r)]
    t = targets_of(r, n)
    return UniMask.hstu(torch.tensor(t)), n, n, lambda b, i, j: meta_hstu(n[b], t[b], 0, 0, 0)[i, j]


MASKS = [
    full, causal, causal_bottom_right, prefix_lm, window, causal_window, sinks_window, document, candidates, target_groups,
    hstu_contextual, hstu_window, hstu, semi_local, beam_tree, session, classes, bos_interval, cross, intervals,
    stochastic_length,
]  # fmt: skip
