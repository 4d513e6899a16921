"""``OnDemand``: data that stay where they are, and of which a model loads the rows of its minibatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int

__all__ = ["OnDemand"]


class OnDemand:
    """An array on disk whose rows are loaded as a model asks for them.

    In a model it is indexed by the rows of a plate; everything else is as with an array in memory: the same rows at the
    same keys, hence the same law and the same draws. Memory holds the rows of ten gradient steps, or 2048 where a
    control variate's full gradient is computed, and what the system caches. (All rows, if the model has several
    subsampled plates and control variates.)

    Args:
        source: anything with ``shape``, ``dtype`` and ``source[rows]`` for increasing row numbers: ``np.memmap``,
            ``np.load(path, mmap_mode="r")``, an HDF5 or Zarr array. It must not change while it is in use. An iterator
            will not do: a chain needs rows at random, and its control variates need all of them again and again.
        dtype: of the rows in the model; None is the source's, in JAX's default precision.

    Attributes:
        shape: of the whole, [N, ...].
        ndim: its length.
        dtype: of the rows.

    Raises:
        TypeError: for a source without these, or one of other things than numbers.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tempfile
        >>> file = np.memmap(tempfile.mktemp(), np.float32, "w+", shape=(1000, 2))
        >>> file[:] = np.random.default_rng(0).normal(size=file.shape)
        >>> def model(x):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     with numpyro.plate("data", len(x), subsample_size=50) as rows:
        ...         numpyro.sample("x", dist.Normal(mu, 1.0).to_event(1), obs=x[rows])
        >>> mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=50, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), fs.OnDemand(file))
        >>> mcmc.get_samples()["mu"].shape
        (20, 2)
    """

    def __init__(self, source: Any, *, dtype: Any = None):
        missing = [name for name in ("shape", "dtype", "__getitem__") if not hasattr(source, name)]
        if missing or not np.shape(source.shape)[0]:
            raise TypeError(
                f"source must be an array of rows on disk, such as np.memmap, got {type(source).__name__}"
                + (f" without {missing[0]}." if missing else " of a single number.")
            )
        self.source = source
        self.dtype = jax.dtypes.canonicalize_dtype(source.dtype if dtype is None else dtype)
        if self.dtype.kind not in "biuf":
            raise TypeError(
                f"{'source' if dtype is None else 'dtype'} must be of real numbers, got dtype {self.dtype}."
            )
        self.shape, self.ndim = tuple(source.shape), len(source.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"OnDemand({type(self.source).__name__} of shape {list(self.shape)}, {self.dtype})"

    def __getitem__(self, rows: Int[Array, "*B"]) -> Array:
        """Rows [*B, ...] by number, by a slice or by a mask [N]."""
        if isinstance(rows, tuple):
            first, *others = rows
            num_axes = 1 if isinstance(first, slice) else np.ndim(first)
            return self[first][(slice(None),) * num_axes + tuple(others)]
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        if (rows if isinstance(rows, jax.Array) else np.asarray(rows)).dtype == bool:
            rows = self._numbers(rows)
        if not isinstance(rows, jax.core.Tracer):
            return jax.numpy.asarray(self._load(rows))
        result = jax.ShapeDtypeStruct((*rows.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(self._load, result, rows, vmap_method="expand_dims")

    def _numbers(self, mask) -> Any:
        if isinstance(mask, jax.core.Tracer) or np.shape(mask) != (len(self),):
            raise IndexError(
                f"{self!r} takes a mask of all its rows [{len(self)}] outside of compiled programs, got one of shape "
                f"{list(np.shape(mask))}: give numbers of rows (np.flatnonzero(mask))."
            )
        return np.flatnonzero(np.asarray(mask))

    def _load(self, rows) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all among the {len(self)} of {self!r}.")
        if isinstance(self.source, np.ndarray):  # np.memmap too; ``take`` is three times as fast as an index
            return np.asarray(np.take(self.source, rows, axis=0), self.dtype)
        distinct, places = np.unique(rows, return_inverse=True)
        return np.asarray(self.source[distinct], self.dtype)[places.reshape(rows.shape)]
