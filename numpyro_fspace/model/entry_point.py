"""``entry_point``: the decorator of functions and methods that users call and that run compiled programs."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("jax._src.callback")
#: Errors that occurred while compiled programs loaded rows of data on disk, newest last.
loading_errors: list[Exception] = []


def entry_point(fn):
    """``fn``, which a user calls.

    It raises the errors of loading rows instead of JAX's error about the compiled program. Meanwhile LAPACK, which JAX
    calls on a CPU, has one thread. The matrices of a step are too small to be divided, and threads that wait for one
    another by spinning take hundreds of times as long as the work itself where another process uses the cores.
    """

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        import threadpoolctl

        loading_errors.clear()
        logger.addFilter(_is_unrelated)  # JAX would also print the error that is raised below
        try:
            with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
                return fn(*args, **kwargs)
        except Exception as found:  # JAX raises several kinds, by where in a program the rows are loaded
            if not loading_errors or found is loading_errors[-1]:
                raise
            error = loading_errors[-1]
        finally:
            logger.removeFilter(_is_unrelated)
        raise error

    return wrapped


def _is_unrelated(record) -> bool:
    """Whether a log message is not about an error of loading rows."""
    return not loading_errors
