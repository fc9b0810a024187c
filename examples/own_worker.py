"""A worker of one's own, driven as one object: declared shards, explicit markers, futures passed on unfetched."""

from __future__ import annotations

import nonet


class Score(nonet.DistributeWorker):
    """Doubles numbers, a share on each rank."""

    @nonet.method(rows=nonet.Shard, collect="concat")
    def double(self, rows: list[int]) -> list[int]:
        """Return twice each number."""
        return [2 * row for row in rows]


def main() -> None:
    """Call a group of two workers."""
    group = nonet.WorkerGroup(Score, workers=2, cpus=0.5, threads=0)
    print(group.double([1, 2, 3, 4, 5]).get(timeout_s=30))  # [2, 4, 6, 8, 10]
    print(group.double(rows=nonet.PerRank([[1], [2]])).get(timeout_s=30))  # [2, 4]
    twice = group.double(group.double([1, 2, 3]))  # The first result does not pass through this process.
    print(twice.get(timeout_s=30))  # [4, 8, 12]
    group.stop()


if __name__ == "__main__":
    main()
