"""Why a host leaves, real or simulated."""


class WorkerStopped(Exception):
    """The host must leave; the text is the cause, for the proxy and the log."""

    def __init__(self, cause: str, exit_code: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.exit_code = exit_code


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of the errors, however deeply the groups are nested."""
    leaf: BaseException = group
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf
