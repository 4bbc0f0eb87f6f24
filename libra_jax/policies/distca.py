"""DistCA's planner as a policy: documents move, bytes per unit of work first, from ranks above the mean to ranks below.

After core attention disaggregation (arXiv 2510.18121, "in place": every rank is also an attention server) and the
planner published with it (github.com/hao-ai-lab/DistCA). Written anew from what is public:

- An item is what one rank holds of one document, all heads together; it moves whole or in part.
- A rank's surplus is its work less the mean. Ranks with a deficit are served one after the other, the largest deficit
  first. From all items of all ranks with a surplus the one is taken that costs the fewest bytes per unit of work, as
  much of it as min(deficit, surplus, item), until the deficit is below `tolerance` of the mean (0.1 is the default
  there).
- Work is cut at multiples of 128 tokens, here at blocks.

Where it leaves a choice, or counts more than need be, the reading that is best for it:

- The published planner charges an item's move with all keys of its document. Here a move costs what travels: pages
  that the receiver is not home to and does not read already, and queries out and outputs back.
- The published planner takes what moves from the middle of a document, as many tokens before it as after; the paper
  asks for the piece with the least traffic. Here it is the best of three: the item's last blocks (fewest queries), its
  first (fewest keys), and the run between that has the fewest bytes when no page is there yet.
- The published loop stops when every deficit is small, which can leave one rank far above the mean. Here ranks that
  are still above the tolerance then go on giving, to ever smaller deficits.
- Targets follow the ranks' speeds. No room limits what a rank receives or sends.
- An attention server there is a tensor-parallel group, up to the 8 GPUs of a node, which split the heads. Here it may
  be any number of neighbouring ranks; what a server executes is dealt to its ranks by head, as in Ulysses. In tensor
  parallelism heads are apart from the start, so what that dealing sends inside a node is not DistCA's to answer for.

Letters: P sequences, S servers, K kv heads, nb blocks of a sequence. Blocks and pages of all sequences are numbered
through, p * nb + b; work is pages of one head, because all heads move together.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from libra_jax.assignments import Policy, home_ranks, keep_padding_home
from libra_jax.spec import PoolSpec

_HALVINGS = 8  # of the tolerance, for ranks above it that no large deficit is left for
_CHUNK = 512  # items looked at together


def distca(tolerance: float = 0.1, server_ranks: int = 1) -> Policy:
    """DistCA's greedy with this tolerance, relative to the mean of the servers.

    No server ends above (1 + tolerance) of its share by more than one block of all heads.

    server_ranks: neighbouring ranks that are one server; a divisor or a multiple of cp.
    """

    def policy(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
        larger, smaller = max(server_ranks, spec.cp), min(server_ranks, spec.cp)
        if spec.ranks % server_ranks or larger % smaller:
            raise ValueError(
                f"server_ranks ({server_ranks}) must divide pool_size * cp ({spec.ranks}), and cp ({spec.cp}) or be a "
                "multiple of it"
            )
        state = _start(first_page, num_pages, spec, speed, server_ranks)
        above = tolerance * state.target
        state.serve(above, np.zeros(len(above)))
        for halving in range(1, _HALVINGS):
            if not (state.surplus > above).any():
                break
            state.serve(above * 0.5**halving, above)
        state.serve(np.zeros(len(above)), above, at_least_one=True)
        # Giving whole blocks leaves some below their share whose turn is over: these take what is too much elsewhere.
        state.serve(np.zeros(len(above)), above + num_pages.max(), at_least_one=True)
        server = state.executor.reshape(spec.pool_size, 1, spec.blocks_per_sequence)
        # Heads in turn, and where ranks share one, its blocks folded, as in `assignments.head_parallel`.
        place = np.arange(spec.blocks_per_sequence) % (2 * server_ranks)
        fold = np.minimum(place, 2 * server_ranks - 1 - place)
        share = (np.arange(spec.num_kv_heads)[:, None] * server_ranks + fold) // spec.num_kv_heads
        return keep_padding_home((server * server_ranks + share).astype(np.int32), num_pages, spec)

    return policy


@dataclasses.dataclass
class _State:
    """The plan so far. Items are runs of blocks at home, in descending order of `reach`: what their last block sees."""

    block_cost: float  # bytes of a block that moves, in pages
    home: np.ndarray  # (P * nb,)
    work: np.ndarray  # (P * nb + 1,) pages visited by the blocks before
    target: np.ndarray  # (S,)
    surplus: np.ndarray  # (S,)
    executor: np.ndarray  # (P * nb,)
    owner: np.ndarray  # (items,) server
    begin: np.ndarray  # (items,) first block
    end: np.ndarray  # (items,) after the last block
    document: np.ndarray  # (items,) page in which its document begins
    reach: np.ndarray  # (items,) at least end - document
    present: dict[int, np.ndarray]  # server: (P * nb,) bool, pages it holds or reads

    def serve(self, enough: np.ndarray, spare: np.ndarray, at_least_one: bool = False) -> None:
        """Lets servers with a surplus above `spare` (S,) give to servers whose deficit is above `enough` (S,).

        at_least_one: a whole block even where its half would be more than the deficit.
        """
        for server in np.argsort(self.surplus, kind="stable"):
            while -self.surplus[server] > enough[server] and (self.surplus > spare).any():
                piece = self._best(int(server), self.surplus > spare, at_least_one)
                if piece is None:
                    break
                self._move(int(server), *piece)

    def _best(self, server: int, gives: np.ndarray, at_least_one: bool) -> tuple[int, int, int] | None:
        """The piece with the fewest bytes per page of work: (item, first block, after the last block)."""
        missing = np.concatenate([[0], np.cumsum(~self._present(server))])
        best, least = None, np.inf
        for chunk in range(0, len(self.begin), _CHUNK):
            if self.block_cost >= least * self.reach[chunk]:  # queries alone cost more, here and in all items after
                break
            items = chunk + np.flatnonzero(gives[self.owner[chunk : chunk + _CHUNK]])
            items = items[self.end[items] > self.begin[items]]
            for start, stop in self._pieces(server, items, at_least_one):
                work = self.work[stop] - self.work[start]
                pages = missing[stop] - missing[self.document[items]]
                cost = np.where(work > 0, self.block_cost * (stop - start) + pages, np.inf) / np.maximum(work, 1)
                if len(items) and cost.min() < least:
                    i = int(cost.argmin())
                    best, least = (int(items[i]), int(start[i]), int(stop[i])), float(cost[i])
        return best

    def _pieces(self, server: int, items: np.ndarray, at_least_one: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each item the three pieces of the work that should move, to the nearest block: (first, after the last)."""
        begin, end, document = self.begin[items], self.end[items], self.document[items]
        most = np.minimum(-self.surplus[server], self.surplus[self.owner[items]])
        most = np.minimum(most, self.work[end] - self.work[begin])
        # b - a blocks that end b pages into their document visit (b^2 - a^2) / 2 pages; with this b the sum of
        # block_cost * (b - a) and b pages is least.
        cost = self.block_cost
        between = document + np.rint((cost + 1) * np.sqrt(2 * most / (2 * cost + 1))).astype(np.int64)
        stop = np.stack([end, self._nearest(self.work[begin] + most), between])
        stop = np.clip(stop, begin + at_least_one, end)
        start = self._nearest(self.work[stop] - most)
        start[1] = begin
        start = np.clip(start, begin, np.maximum(stop - at_least_one, begin))
        return list(zip(start, stop, strict=True))

    def _nearest(self, work: np.ndarray) -> np.ndarray:
        """The number of blocks before which the work is nearest to this."""
        after = np.clip(np.searchsorted(self.work, work), 1, len(self.work) - 1)
        return after - (work - self.work[after - 1] <= self.work[after] - work)

    def _present(self, server: int) -> np.ndarray:
        if server not in self.present:
            own = self.owner == server
            step = np.zeros(len(self.work), np.int64)
            np.add.at(step, self.document[own], 1)
            np.add.at(step, self.end[own], -1)
            self.present[server] = (self.home == server) | (np.cumsum(step)[:-1] > 0)
        return self.present[server]

    def _move(self, server: int, item: int, start: int, stop: int) -> None:
        self._present(server)[self.document[item] : stop] = True
        self.executor[start:stop] = server
        moved = self.work[stop] - self.work[start]
        self.surplus[server] += moved
        self.surplus[self.home[start]] -= moved
        begin, end, document = self.begin[item], self.end[item], self.document[item]
        if start == begin:
            self.begin[item] = stop
            return
        self.end[item] = start
        if stop < end:  # what is left behind the piece is an item of its own
            place = np.searchsorted(-self.reach, document - end)
            self.begin, self.end = np.insert(self.begin, place, stop), np.insert(self.end, place, end)
            self.document = np.insert(self.document, place, document)
            self.owner = np.insert(self.owner, place, self.home[start])
            self.reach = np.insert(self.reach, place, end - document)


def _start(
    first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray, server_ranks: int
) -> _State:
    """Everything at home. server_ranks: neighbouring ranks that are one server."""
    nb = spec.blocks_per_sequence
    home = home_ranks(spec).reshape(-1).astype(np.int64) // server_ranks
    speed = speed.reshape(-1, server_ranks).sum(1)
    first = (first_page + nb * np.arange(spec.pool_size)[:, None]).reshape(-1).astype(np.int64)
    pages = num_pages.reshape(-1)
    work = np.concatenate([[0], np.cumsum(pages, dtype=np.int64)])
    target = work[-1] * speed / speed.sum()
    # Neighbours with the same first page and home are an item: a document, or what a rank holds of it.
    starts = np.ones(len(first), bool)
    starts[1:] = (first[1:] != first[:-1]) | (home[1:] != home[:-1]) | ((pages[1:] > 0) != (pages[:-1] > 0))
    begin = np.flatnonzero(starts)
    end = np.append(begin[1:], len(first))
    begin, end = begin[pages[begin] > 0], end[pages[begin] > 0]
    order = np.argsort(first[begin] - end, kind="stable")
    begin, end = begin[order], end[order]
    return _State(
        block_cost=spec.block_bytes / spec.page_bytes,
        home=home,
        work=work,
        target=target,
        surplus=np.bincount(home, pages, minlength=len(target)) - target,
        executor=home.astype(np.int32),
        owner=home[begin],
        begin=begin,
        end=end,
        document=first[begin],
        reach=end - first[begin],
        present={},
    )
