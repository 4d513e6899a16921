"""Progress of a run in parts of about half a second, after which the bar moves and Ctrl-C takes effect."""

from __future__ import annotations

import signal
import sys
import threading
import time

import jax
import numpy as np
from tqdm.auto import tqdm

from numpyro_fspace.mcmc.state import KernelState
from numpyro_fspace.posterior.rhat_ess import convergence

#: Seconds that a part should take; least number of draws of each chain for which R-hat is shown.
INTERVAL, MIN_DRAWS = 0.5, 20


def is_watched() -> bool:
    """Whether a bar would be seen: in a terminal or a notebook, but not in a log."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Progress:
    """The lengths of the parts of a run, and a bar that shows the state of the chains after each part.

    The first part is one draw. The others are to last ``INTERVAL`` seconds each.

    Args:
        num_warmup, total: draws of warm-up, and all draws.
        done: draws made already.
        shown: whether there is a bar.
    """

    def __init__(self, num_warmup: int, total: int, done: int = 0, *, shown: bool = True):
        self.num_warmup, self.total, self.done, self.shown = num_warmup, total, done, shown
        self.size = 1
        self.bar = tqdm(total=total, initial=done, disable=not shown)
        self._show_phase()
        self._start = time.monotonic()

    def next_stop(self) -> int:
        """Where the next part ends."""
        return min(self.done + self.size, self.num_warmup if self.done < self.num_warmup else self.total)

    def update(self, done: int, state, functions=None):
        """Note that ``done`` draws are made; ``functions`` [S, C, P] are values at the draws that are kept."""
        num, self.done = done - self.done, done
        jax.block_until_ready(state)
        seconds = time.monotonic() - self._start
        self.size = max(1, round(num * min(2.0, INTERVAL / max(seconds, 1e-9))))
        if self.shown:
            self._show_phase()
            self.bar.set_postfix_str(", ".join(_texts(state, functions)), refresh=False)
            self.bar.update(num)
        self._start = time.monotonic()

    def close(self):
        self.bar.close()

    def _show_phase(self):
        self.bar.set_description("sample" if self.done >= self.num_warmup else "warm-up", refresh=False)


class Interruption:
    """Delays Ctrl-C until the end of a part of a run, because within a part it would lose the draws.

    A second Ctrl-C in the same part takes effect at once. Only the main thread receives it.

    Attributes:
        is_due: whether ``let_through`` will call the program's handler, which usually raises KeyboardInterrupt.
    """

    def __init__(self):
        self.is_due, self._handler = False, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def hold(self):
        """Delay Ctrl-C from now until the end of ``with``."""
        handler = signal.getsignal(signal.SIGINT)
        is_received = threading.current_thread() is threading.main_thread() and callable(handler)
        if self._handler is None and is_received:
            self._handler = handler
            signal.signal(signal.SIGINT, self._wait)

    def let_through(self):
        """Call the program's handler if Ctrl-C was pressed."""
        if self.is_due:
            self.is_due = False
            self._handler(signal.SIGINT, None)

    def _wait(self, number, frame):
        if self.is_due:
            self._handler(number, frame)
        self.is_due = True


def _texts(state, functions):
    """Short texts on the state of the chains, with means over chains."""
    if isinstance(state, KernelState):
        yield f"U {_mean(state.potential_energy):.4g}"
        if np.any(state.step_size):  # none yet while the optimizer runs
            yield f"step {_mean(state.step_size):.2g}"
            if state.momentum.size:
                yield f"T {_mean(state.temperature):.2f}"
        if np.sum(state.num_diverging):
            yield f"{int(np.sum(state.num_diverging))} diverged"
    if functions is not None and len(functions) >= MIN_DRAWS:
        draws = np.moveaxis(np.asarray(functions, float), -1, 0).swapaxes(1, 2)  # [P, C, S]
        draws = draws[np.isfinite(draws).all((1, 2)) & (draws.std((1, 2)) > 0)]
        if len(draws):
            yield f"R-hat of f {convergence(draws)[0].max():.2f}"


def _mean(values) -> float:
    return float(np.mean(np.asarray(values)))
