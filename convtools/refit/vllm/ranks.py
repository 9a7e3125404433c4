"""Which ranks of an engine are whole, and at which version: steps run when all are, at one."""


class Ranks:
    """Versions of the ranks that are whole.

    >>> ranks = Ranks(2)
    >>> ranks.agree
    True
    >>> ranks.hold(0)
    0
    >>> ranks.serve(0, 1)
    >>> ranks.agree, ranks.describe()
    (False, 'rank 0 at version 1, rank 1 at version 0')
    >>> ranks.serve(1, 1)
    >>> ranks.agree
    True
    """

    def __init__(self, count: int, version: int = 0) -> None:
        self._versions: dict[int, int | None] = dict.fromkeys(range(count), version)

    @property
    def agree(self) -> bool:
        """Whether all are whole, at the same version."""
        found = set(self._versions.values())
        return len(found) == 1 and None not in found

    def __contains__(self, rank: int) -> bool:
        return rank in self._versions

    def hold(self, rank: int) -> int | None:
        """It is not whole from now on; gives what it was."""
        before = self._versions[rank]
        self._versions[rank] = None
        return before

    def restore(self, rank: int, before: int | None) -> None:
        """It is what `hold` gave: nothing was changed."""
        self._versions[rank] = before

    def serve(self, rank: int, version: int) -> None:
        """It is whole, at this version."""
        self._versions[rank] = version

    def describe(self) -> str:
        """For messages."""
        states = ("not whole" if v is None else f"at version {v}" for v in self._versions.values())
        return ", ".join(f"rank {rank} {state}" for rank, state in zip(self._versions, states, strict=True))
