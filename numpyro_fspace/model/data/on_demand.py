"""``OnDemand``: data on disk, from which a model loads the rows of its minibatches."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import plate

from numpyro_fspace.model._numpyro import active_handlers, plate_rows
from numpyro_fspace.model.entry_point import loading_errors
from numpyro_fspace.model.float32_rounding import lost_to_rounding

if TYPE_CHECKING:
    from jaxtyping import Array, Int

#: Maximum number of (evenly spaced) rows, and of numbers in them, from which the precision of a source is judged.
MAX_ROWS, MAX_NUMBERS = 1000, 2**20


class OnDemand:
    """An array on disk whose rows are loaded when a model needs them.

    In a model it is indexed by the rows of a plate. The same keys give the same rows as with an array in memory, and
    hence the same draws. Memory holds the rows of ten gradient steps of each chain, or 2048 rows (a minibatch, if that
    is larger) while a control variate's gradient of all data is computed, in addition to the system's cache. (With
    several subsampled plates and control variates, it holds all rows.)

    Args:
        source: anything with ``shape``, ``dtype`` and ``source[rows]`` for increasing row numbers: ``np.memmap``,
            ``np.load(path, mmap_mode="r")``, an HDF5 or Zarr array. It must not change while it is in use. It cannot be
            an iterator, because a chain needs random rows, and control variates need all rows repeatedly.
        dtype: type of the rows in the model; None is the type of the source, in JAX's default precision.

    Rows are checked when they are loaded. NaN and infinite values, integers that do not fit into ``dtype``, and a file
    that was truncated after it was opened end the run with an error. If rows become float32, a sample of them is
    checked in advance for values that float32 cannot tell apart, such as time in seconds since 1970.

    Attributes:
        shape: shape of the source, [N, ...].
        ndim: number of its dimensions.
        dtype: type of the rows.

    Raises:
        TypeError: the source lacks these attributes, is a table or a masked array, or its entries are not numbers.
        ValueError: the source is empty, or holds values whose differences are lost in float32; when rows are loaded,
            values are not finite or do not fit into ``dtype``, or the plate has another size.
        IndexError: rows that do not exist are loaded.
        OSError: the file is shorter than when it was opened.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, tempfile
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
        if hasattr(source, "iloc") or isinstance(source, np.ma.MaskedArray):
            raise TypeError(
                f"source is a {type(source).__name__}, whose rows are taken by label or masked: give its values as an "
                "array (.to_numpy(), .filled(...))."
            )
        self.source, self.dtype = source, _dtype(source.dtype if dtype is None else dtype)
        if self.dtype is None:
            name, given = ("source", source.dtype) if dtype is None else ("dtype", dtype)
            with contextlib.suppress(TypeError):
                given = jax.dtypes.canonicalize_dtype(given)
            raise TypeError(f"{name} must be of real numbers, got dtype {given}.")
        self.shape, self.ndim = tuple(source.shape), len(source.shape)
        if 0 in self.shape:
            raise ValueError(f"source is empty: it has the shape {list(self.shape)}.")
        self._check_precision()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"OnDemand({type(self.source).__name__} of shape {list(self.shape)}, {self.dtype})"

    @property
    def __jax_array__(self):
        """Refused, where functions and operators of JAX ask for it, which take whole arrays.

        Not by a ``TypeError``, for which JAX would raise one of its own that does not name the cure.
        """
        raise self.refused()

    def refused(self) -> ValueError:
        """The error for a use of the whole array, which names the cure."""
        return ValueError(
            f"{self!r} is on disk: a model takes rows of it, by minibatches, and not the whole array. Write "
            f'with numpyro.plate("data", {len(self)}, subsample_size=B) as rows: and x[rows] within, also in place of '
            "numpyro.subsample(x, ...); or, if the data fit into memory, pass x[:] to the model."
        )

    def __getitem__(self, rows: Int[Array, "*B"]) -> Array:
        """Rows [*B, ...] by number, by a slice or by a mask [N]; other axes by numbers and slices."""
        if isinstance(rows, tuple):
            first, *others = rows
            num_axes = 1 if isinstance(first, slice) else np.ndim(first)
            arrays = [part for part in others if not isinstance(part, slice) and np.ndim(part)]
            if arrays and num_axes and not isinstance(first, slice):
                raise IndexError(
                    f"{self!r} takes an array of numbers along its rows alone. Take the rows first, then columns of "
                    "all, x[rows][:, columns], or an entry of each, "
                    "jnp.take_along_axis(x[rows], columns[:, None], 1)[:, 0]."
                )
            return self[first][(slice(None),) * num_axes + tuple(others)]
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        for frame in active_handlers():
            if isinstance(frame, plate) and plate_rows(frame) is rows and frame.size != len(self):
                raise ValueError(
                    f"plate {frame.name!r} has {frame.size} rows and {self!r} has {len(self)}: the numbers must agree."
                )
        if (rows if isinstance(rows, jax.Array) else np.asarray(rows)).dtype == bool:
            rows = self._numbers(rows)
        if not isinstance(rows, jax.core.Tracer):
            return jax.numpy.asarray(self._load(rows))
        result = jax.ShapeDtypeStruct((*rows.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(self._load_or_note, result, rows, vmap_method="expand_dims")

    def _numbers(self, mask) -> Any:
        if isinstance(mask, jax.core.Tracer) or np.shape(mask) != (len(self),):
            raise IndexError(
                f"{self!r} takes a mask of all its rows [{len(self)}] outside of compiled programs, got one of shape "
                f"{list(np.shape(mask))}: give numbers of rows (np.flatnonzero(mask))."
            )
        return np.flatnonzero(np.asarray(mask))

    def _load_or_note(self, rows) -> np.ndarray:
        try:
            return self._load(rows)
        except Exception as error:
            loading_errors.append(error)
            raise

    def _check_precision(self):
        """Refuse a source whose rows, judged by a sample, float32 cannot tell apart."""
        if self.dtype != np.float32 or _dtype(self.source.dtype) == self.source.dtype != np.int32:
            return
        num = min(len(self), MAX_ROWS, max(2, MAX_NUMBERS // math.prod(self.shape[1:])))
        rows = np.unique(np.linspace(0, len(self) - 1, num).astype(int))
        values = self._taken(rows)
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(values.astype(np.float32))
        trouble = lost_to_rounding(values if is_finite.all() else np.where(is_finite, values, np.nan))
        if trouble is not None:
            raise ValueError(f"The source of {self!r} {trouble}.")

    def _load(self, rows) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all among the {len(self)} of {self!r}.")
        return self._converted(self._taken(rows))

    def _taken(self, rows) -> np.ndarray:
        if isinstance(self.source, np.ndarray):  # np.memmap too; ``take`` is three times as fast as an index
            _check_file(self.source)
            return np.asarray(np.take(self.source, rows, axis=0))
        distinct, places = np.unique(rows, return_inverse=True)
        values = np.asarray(self.source[distinct])
        if values.shape != (len(distinct), *self.shape[1:]):
            raise ValueError(f"{self!r}: {len(distinct)} rows of source have the shape {list(values.shape)}.")
        return values[places.reshape(rows.shape)]

    def _converted(self, values) -> np.ndarray:
        with np.errstate(all="ignore"):
            kept = values.astype(self.dtype)
            if jnp.issubdtype(self.dtype, jnp.floating):
                # The sum takes a third of the time of a test of every number.
                is_whole = np.isfinite(kept.sum(dtype=np.float64)) or np.isfinite(kept).all()
            else:
                is_whole = kept is values or np.array_equal(kept, values)
        if is_whole:
            return kept
        if not jnp.issubdtype(self.dtype, jnp.floating):
            changed = values[kept != values][0]
            raise ValueError(
                f"{self!r} would change {values.dtype} values such as {changed} to {self.dtype}: give "
                'dtype="float32", or call jax.config.update("jax_enable_x64", True) first.'
            )
        if np.isfinite(values).all():
            raise ValueError(
                f"{self!r} would make {values.dtype} values such as {np.abs(values).max():g} infinite in {self.dtype}: "
                'standardize them, or call jax.config.update("jax_enable_x64", True) first.'
            )
        raise ValueError(
            f"{self!r} holds NaN or infinite values; drop those rows, impute them, or write any number there and leave "
            "it out of the likelihood with numpyro.handlers.mask."
        )


def _dtype(dtype):
    """The type that JAX uses for real numbers of ``dtype``, in the machine's byte order; None for anything else."""
    with contextlib.suppress(TypeError, ValueError):
        native = np.dtype(dtype).newbyteorder("=")
        kept = np.dtype(jax.dtypes.canonicalize_dtype(np.float64 if native == np.longdouble else native))
        if any(jnp.issubdtype(kept, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
            return kept
    return None


def _check_file(array):
    """Refuse a mapped file that has become shorter, because the system kills a process that reads beyond its end."""
    start = 0
    while isinstance(array, np.ndarray):
        start = getattr(array, "offset", 0)
        array = array.base
    if isinstance(array, mmap.mmap):
        needed = start - start % mmap.ALLOCATIONGRANULARITY + len(array)
        if array.size() < needed:
            raise OSError(f"the file of source was truncated: it has {array.size()} bytes, but {needed} are mapped.")
