"""The tile attention kernels in Triton: forward, dQ, and dK with dV. Needs triton alone, so that the same functions
run in Triton's interpreter, compile ahead of time, and are called from jax (`triton.py`).

The online softmax is FlashAttention's (arXiv 2205.14135, 2307.08691); the tables are those of `tiles.py`. A program of
`forward_kernel` and `dq_kernel` owns M rows of one block: the G query heads of a key/value head lie side by side in
memory, so a row tile holds M / G tokens with all their heads, and short documents still fill it. A program of
`dkv_kernel` owns N keys of one page and walks the blocks that read it, in ascending order. Everything is written by
its one owner: no atomics, and the same bits from run to run.

Keys go N at a time, counted from the start of the sequence whatever the plan, and only key tiles that some row sees
are visited. Those that every row sees whole skip the mask; only tiles at an edge (where documents and windows begin,
and at the diagonal) pay for it. One loop with a branch: three loops (masked, whole, masked) need more registers.

OVERLAP changes the order of the products, for tensor cores that work beside the other instructions (`launch.py`).

Letters as in `tiles.py`. Widths that are no powers of two are cut into two that are: D = D0 + D1 and E = E0 + E1, the
second 0 where it is not needed. Logits are raw dot products here (capped ones with a soft cap); FACTOR turns them into
exponents of two, LOGIT into natural logits.

Parameters that begin with an underscore are not read: jax-triton 0.3 passes there what aliases the outputs.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def forward_kernel(
    q, k, v, entries, pages, first_visible, start, stop, out, lse, _out, _lse,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the entries start to stop. Grid: all entries times row tiles of a block.

    The last entry goes first: later blocks see more, and the tables list light sequences before heavy ones, so that
    the programs that run last, with idle neighbours, are short.
    """
    LOGIT: tl.constexpr = SCALE if SOFT_CAP is None else 1.0
    FACTOR: tl.constexpr = LOGIT * LOG2E
    TILES: tl.constexpr = B * G // M
    x = tl.load(stop) - 1 - tl.program_id(0) // TILES
    if x < tl.load(start):
        return
    slot, block, first_page, num_pages, page_base = _entry(entries, x)
    row = (tl.program_id(0) % TILES) * M + tl.arange(0, M)
    first, query = _rows(first_visible, slot, block, row, B, G)
    left, full, right, end = _key_tiles(first, query, first_page, num_pages, B, N)
    page_row = pages + (page_base - first_page)

    block_row = slot.to(tl.int64) * (B * G)
    pair = lse + (block_row + row) * 2
    if OVERLAP:
        if num_pages == 0:  # a block of padding
            nothing0, nothing1 = tl.zeros([M, E0], tl.float32), tl.zeros([M, E1 if E1 else 16], tl.float32)
            _store(out + block_row * (E0 + E1), row, nothing0, nothing1, E0, E1)
            tl.store(pair, tl.full([M], float("-inf"), tl.float32))
            tl.store(pair + 1, tl.zeros([M], tl.float32))
            return
        # At least one tile, all masked if nobody sees it. A loop that may not run at all keeps the compiler from
        # letting products run on from one turn to the next.
        last = (first_page + num_pages) * (B // N) - 1
        left, end = tl.minimum(left, last), tl.minimum(end, last + 1)
        end = tl.maximum(end, left + 1)
        tl.assume(left < end)

    q0, q1 = _load(q + block_row * (D0 + D1), row, D0, D1)
    top = tl.full([M], LOWEST, tl.float32)  # finite: keeps exp2 out of inf - inf in rows that have seen nothing yet
    total = tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, E0], tl.float32)
    acc1 = tl.zeros([M, E1 if E1 else 16], tl.float32)
    keep = tl.full([M], 1.0, tl.float32)
    weights = tl.zeros([M, N], q.dtype.element_ty)
    for j in range(left, end):
        k0, k1 = _load(k + _key_row(page_row, j, B, N) * (D0 + D1), tl.arange(0, N), D0, D1)
        logits = tl.dot(q0, tl.trans(k0))
        if D1:
            logits = tl.dot(q1, tl.trans(k1), logits)
        if OVERLAP:
            # The tile before, whose product runs during this one's exponentials; at first there is nothing to add.
            # Adding 0 changes no weight: straight from the turn before they would go through shared memory.
            weights = weights + 0.0
            key_row = _key_row(page_row, tl.maximum(j - 1, left), B, N)
            acc0, acc1 = _accumulate(acc0, acc1, keep, weights, v, key_row, E0, E1, N)
        logits = _cap(logits, SCALE, SOFT_CAP)
        if (j < full) | (j >= right):
            key = j * N + tl.arange(0, N)
            logits = tl.where(_visible(first[:, None], query[:, None], key[None, :]), logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = new_top * FACTOR
        exponentials = tl.exp2(logits * FACTOR - shift[:, None])
        keep = tl.exp2(top * FACTOR - shift)
        total = total * keep + tl.sum(exponentials, 1)
        weights = exponentials.to(q.dtype.element_ty)
        top = new_top
        if not OVERLAP:
            acc0, acc1 = _accumulate(acc0, acc1, keep, weights, v, _key_row(page_row, j, B, N), E0, E1, N)
    if OVERLAP:
        weights = weights + 0.0
        acc0, acc1 = _accumulate(acc0, acc1, keep, weights, v, _key_row(page_row, end - 1, B, N), E0, E1, N)

    safe = tl.where(total == 0.0, 1.0, total)
    inverse = (1.0 / safe)[:, None]
    _store(out + block_row * (E0 + E1), row, acc0 * inverse, acc1 * inverse, E0, E1)
    tl.store(pair, tl.where(total == 0.0, float("-inf"), top * LOGIT))
    tl.store(pair + 1, tl.log2(safe) * LN2)


@triton.jit
def dq_kernel(
    q, k, v, d_out, exponent, delta, entries, pages, first_visible, start, stop, dq, _dq,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of the entries start to stop, in the order of `forward_kernel`.

    exponent: (Q, B, G) float32, the log-sum-exp as an exponent of two.
    """
    TILES: tl.constexpr = B * G // M
    FACTOR: tl.constexpr = (SCALE if SOFT_CAP is None else 1.0) * LOG2E
    x = tl.load(stop) - 1 - tl.program_id(0) // TILES
    if x < tl.load(start):
        return
    slot, block, first_page, num_pages, page_base = _entry(entries, x)
    row = (tl.program_id(0) % TILES) * M + tl.arange(0, M)
    first, query = _rows(first_visible, slot, block, row, B, G)
    left, full, right, end = _key_tiles(first, query, first_page, num_pages, B, N)
    page_row = pages + (page_base - first_page)

    block_row = slot.to(tl.int64) * (B * G)
    q0, q1 = _load(q + block_row * (D0 + D1), row, D0, D1)
    g0, g1 = _load(d_out + block_row * (E0 + E1), row, E0, E1)
    shift = tl.load(exponent + block_row + row)
    row_delta = tl.load(delta + block_row + row)
    acc0 = tl.zeros([M, D0], tl.float32)
    acc1 = tl.zeros([M, D1 if D1 else 16], tl.float32)
    for j in range(left, end):
        key_row = _key_row(page_row, j, B, N)
        k0, k1 = _load(k + key_row * (D0 + D1), tl.arange(0, N), D0, D1)
        v0, v1 = _load(v + key_row * (E0 + E1), tl.arange(0, N), E0, E1)
        logits = tl.dot(q0, tl.trans(k0))
        d_weights = tl.dot(g0, tl.trans(v0))
        if D1:
            logits = tl.dot(q1, tl.trans(k1), logits)
        if E1:
            d_weights = tl.dot(g1, tl.trans(v1), d_weights)
        logits = _cap(logits, SCALE, SOFT_CAP)
        weights = tl.exp2(logits * FACTOR - shift[:, None])
        d_logits = weights * (d_weights - row_delta[:, None])
        if SOFT_CAP is not None:
            d_logits = d_logits * _cap_slope(logits, SOFT_CAP)
        if (j < full) | (j >= right):
            key = j * N + tl.arange(0, N)
            d_logits = tl.where(_visible(first[:, None], query[:, None], key[None, :]), d_logits, 0.0)
        d_logits = d_logits.to(k0.dtype)
        acc0 = tl.dot(d_logits, k0, acc0)
        if D1:
            acc1 = tl.dot(d_logits, k1, acc1)
    _store(dq + block_row * (D0 + D1), row, acc0 * SCALE, acc1 * SCALE, D0, D1)


@triton.jit
def dkv_kernel(
    q, k, v, d_out, exponent, delta, entries, pages, first_visible, readers, dk, dv, _dk, _dv,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv what one wave's entries contribute. Grid: rows of `pages` times key tiles of a page.

    readers: (L, 4) int32, for each row of `pages` the entries that visit it: the first and one past the last, which
        are neighbours in ascending order of their blocks, and likewise those whose every row sees the whole page.
    """
    TILES: tl.constexpr = B // N
    ROW_TILES: tl.constexpr = B * G // M
    FACTOR: tl.constexpr = (SCALE if SOFT_CAP is None else 1.0) * LOG2E
    page_row = tl.program_id(0) // TILES
    low = tl.load(readers + page_row * 4)
    high = tl.load(readers + page_row * 4 + 1)
    if low >= high:
        return
    whole_start = tl.load(readers + page_row * 4 + 2)
    whole_stop = tl.load(readers + page_row * 4 + 3)
    _, _, first_page, _, page_base = _entry(entries, low)
    first_key = (tl.program_id(0) % TILES) * N
    column = tl.arange(0, N)
    page = first_page + page_row - page_base
    key = page * B + first_key + column
    key_row = tl.load(pages + page_row).to(tl.int64) * B + first_key
    k0, k1 = _load(k + key_row * (D0 + D1), column, D0, D1)
    v0, v1 = _load(v + key_row * (E0 + E1), column, E0, E1)
    dk0 = tl.zeros([N, D0], tl.float32)
    dk1 = tl.zeros([N, D1 if D1 else 16], tl.float32)
    dv0 = tl.zeros([N, E0], tl.float32)
    dv1 = tl.zeros([N, E1 if E1 else 16], tl.float32)
    # Of the first block, rows before the keys do not count; of the last one, those that begin to see after them.
    first_block = tl.load(entries + low * 5 + 1)
    skipped = tl.where(first_block == page, first_key * G // M, 0)
    last_slot = tl.load(entries + (high - 1) * 5).to(tl.int64)
    token = tl.arange(0, B)
    seen = tl.max(tl.where(tl.load(first_visible + last_slot * B + token) <= tl.max(key, 0), token + 1, 0), 0)
    for i in range(low * ROW_TILES + skipped, (high - 1) * ROW_TILES + (seen * G + M - 1) // M):
        x = i // ROW_TILES
        slot = tl.load(entries + x * 5)
        row_base = slot.to(tl.int64) * (B * G) + i % ROW_TILES * M
        row = tl.arange(0, M)
        q0, q1 = _load(q + row_base * (D0 + D1), row, D0, D1)
        g0, g1 = _load(d_out + row_base * (E0 + E1), row, E0, E1)
        shift = tl.load(exponent + row_base + row)
        row_delta = tl.load(delta + row_base + row)
        # Transposed: keys are the rows, so that weights and their gradients need no exchange between threads.
        logits = tl.dot(k0, tl.trans(q0))
        if D1:
            logits = tl.dot(k1, tl.trans(q1), logits)
        if OVERLAP:  # runs during the exponentials; starts at minus delta, which then takes no registers of its own
            d_weights = tl.dot(v0, tl.trans(g0), tl.broadcast_to(-row_delta[None, :], (N, M)))
            if E1:
                d_weights = tl.dot(v1, tl.trans(g1), d_weights)
        logits = _cap(logits, SCALE, SOFT_CAP)
        weights = tl.exp2(logits * FACTOR - shift[None, :])
        edge = (x < whole_start) | (x >= whole_stop)
        if edge:
            block = tl.load(entries + x * 5 + 1)
            first, query = _rows(first_visible, slot, block, i % ROW_TILES * M + row, B, G)
            visible = _visible(first[None, :], query[None, :], key[:, None])
            weights = tl.where(visible, weights, 0.0)
            if OVERLAP:
                d_weights = tl.where(visible, d_weights, 0.0)
        dv0 = tl.dot(weights.to(g0.dtype), g0, dv0)
        if E1:
            dv1 = tl.dot(weights.to(g0.dtype), g1, dv1)
        if not OVERLAP:
            d_weights = tl.dot(v0, tl.trans(g0))
            if E1:
                d_weights = tl.dot(v1, tl.trans(g1), d_weights)
            d_weights -= row_delta[None, :]
        d_logits = weights * d_weights
        if SOFT_CAP is not None:
            d_logits = d_logits * _cap_slope(logits, SOFT_CAP)
        if not OVERLAP:  # noqa: SIM102  one is for the compiler, one is not
            # With widths over 128 the branch also sends d_logits through shared memory, which is where both warp
            # groups need them, and the compiler does not think of it by itself.
            if edge:  # where the weight is 0, whatever it is multiplied with
                d_logits = tl.where(weights > 0.0, d_logits, 0.0)
        d_logits = d_logits.to(q0.dtype)
        dk0 = tl.dot(d_logits, q0, dk0)
        if D1:
            dk1 = tl.dot(d_logits, q1, dk1)
    _add(dk + key_row * (D0 + D1), column, dk0 * SCALE, dk1 * SCALE, D0, D1)
    _add(dv + key_row * (E0 + E1), column, dv0, dv1, E0, E1)


@triton.jit
def _entry(entries, x):
    """The five columns of an entry."""
    at = entries + x * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _rows(first_visible, slot, block, row, B: tl.constexpr, G: tl.constexpr):
    """First visible key and own position of rows (token, head) of a block."""
    token = row // G
    return tl.load(first_visible + slot.to(tl.int64) * B + token), block * B + token


@triton.jit
def _visible(first, query, key):
    return (key >= first) & (key <= query)


@triton.jit
def _key_tiles(first, query, first_page, num_pages, B: tl.constexpr, N: tl.constexpr):
    """Key tiles of N that the rows may see: left to full masked, full to right whole, right to end masked."""
    low = tl.maximum(tl.min(first, 0), first_page * B)
    high = tl.minimum(tl.max(query, 0) + 1, (first_page + num_pages) * B)
    left = low // N
    end = tl.maximum((high + N - 1) // N, left)
    full = tl.minimum((tl.max(first, 0) + N - 1) // N, end)
    full = tl.maximum(full, left)
    right = tl.minimum((tl.min(query, 0) + 1) // N, end)
    right = tl.maximum(right, full)
    return left, full, right, end


@triton.jit
def _key_row(page_row, j, B: tl.constexpr, N: tl.constexpr):
    """Where in k and v the tile j of N keys stands, in rows. Divides by B // N and not by B: far fewer registers."""
    return tl.load(page_row + j // (B // N)).to(tl.int64) * B + j % (B // N) * N


@triton.jit
def _accumulate(acc0, acc1, keep, weights, v, key_row, E0: tl.constexpr, E1: tl.constexpr, N: tl.constexpr):
    """acc * keep + weights @ values."""
    v0, v1 = _load(v + key_row * (E0 + E1), tl.arange(0, N), E0, E1)
    acc0 = tl.dot(weights, v0, acc0 * keep[:, None])
    if E1:
        acc1 = tl.dot(weights, v1, acc1 * keep[:, None])
    return acc0, acc1


@triton.jit
def _cap(logits, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Raw logits, or with a soft cap scaled and capped ones."""
    if SOFT_CAP is None:
        return logits
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both ends
        return SOFT_CAP * (1.0 - 2.0 / (tl.exp2(logits * (SCALE / SOFT_CAP * 2.0 * LOG2E)) + 1.0))


@triton.jit
def _cap_slope(logits, SOFT_CAP: tl.constexpr):
    ratio = logits * (1.0 / SOFT_CAP)
    return 1.0 - ratio * ratio


@triton.jit
def _load(base, row, W0: tl.constexpr, W1: tl.constexpr):
    """Rows of width W0 + W1 as two tiles; where W1 is 0 the second is the first again, and not used."""
    at = base + row[:, None] * (W0 + W1)
    first = tl.load(at + tl.arange(0, W0)[None, :])
    if W1:
        return first, tl.load(at + (W0 + tl.arange(0, W1))[None, :])
    else:
        return first, first


@triton.jit
def _store(base, row, x0, x1, W0: tl.constexpr, W1: tl.constexpr):
    at = base + row[:, None] * (W0 + W1)
    tl.store(at + tl.arange(0, W0)[None, :], x0.to(base.dtype.element_ty))
    if W1:
        tl.store(at + (W0 + tl.arange(0, W1))[None, :], x1.to(base.dtype.element_ty))


@triton.jit
def _add(base, row, x0, x1, W0: tl.constexpr, W1: tl.constexpr):
    at = base + row[:, None] * (W0 + W1)
    here = at + tl.arange(0, W0)[None, :]
    tl.store(here, tl.load(here) + x0)
    if W1:
        here = at + (W0 + tl.arange(0, W1))[None, :]
        tl.store(here, tl.load(here) + x1)
