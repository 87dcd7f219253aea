"""What a store's place may raise: what passes and is tried again, and what a person can do.

It knows neither stores nor any backend: those raise OSErrors that say enough.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from statetrain.errors import CheckpointError

__all__ = ["explained", "retried"]

log = logging.getLogger("statetrain")
T = TypeVar("T")

TRIES = 4
PAUSE = 0.5  # seconds before the first retry; doubled each time
PATIENCE = 10.0  # seconds of one attempt after which there is no other: the client has retried
LASTING = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG, errno.EINVAL,
    errno.ELOOP, errno.EACCES, errno.EPERM,
}  # fmt: skip
NO_WAY = (
    FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError,
)  # fmt: skip


def retried(
    attempt: Callable[[], T],
    *,
    url: str,
    pause: Callable[[float], None],
    renew: Callable[[], None] | None = None,
) -> T:
    """Try again after an error that may pass; what is refused, missing or full does not pass.

    `renew` connects anew before each further try.
    """
    for number in range(TRIES - 1):
        begun = time.monotonic()
        try:
            return attempt()
        except OSError as error:
            lasting = isinstance(error, NO_WAY) or error.errno in LASTING
            if lasting or time.monotonic() - begun > PATIENCE:
                raise
            log.info("%s: %r, trying again", url, error)
        pause(PAUSE * 2**number)
        if renew is not None:
            with contextlib.suppress(OSError, CheckpointError):  # the attempt says it better
                renew()
    return attempt()


@contextlib.contextmanager
def explained(doing: str, url: str) -> Iterator[None]:
    """Turn a failure into an error that names the URL, the cause and what to do.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {doing} {url}: {error}; {_advice(error)}") from error


def _advice(error: OSError) -> str:
    code = error.errno
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket or folder: make it, or correct the URL"
    if code in {errno.ENOSPC, errno.EDQUOT}:
        return "the disk is full: free some space, or keep fewer checkpoints"
    if code in {errno.EACCES, errno.EPERM, errno.EROFS} or isinstance(error, PermissionError):
        return "this user may not do that there: check the permissions and credentials"
    if code in {errno.ENOTDIR, errno.EEXIST}:
        return "a file is where a folder should be: name another place"
    return "check that it can be reached, and run the same command again"
