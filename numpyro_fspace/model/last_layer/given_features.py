"""The last layer of a network under ``gp_network``, given its features: its map, its Gaussian distribution."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul
from numpyro_fspace.model.last_layer.ridge import Orthonormal, ridge_solver

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def last_layer_given(features, tau, center, *, last_layer, values, residual):
    """b = b₀ + G (c + W z - Ψ b₀ - τ e), the calibrated last layer.

    With standard normal b₀, z and e the network Ψ b has nearly the values c + W z at the points.

    Args:
        features, tau, center: Ψ, τ and c, as in ``LastLayerPrior``.
        last_layer: b₀ [H, K].
        values: W z [M, K].
        residual: e [M, K].
    """
    missing = center + values - matmul(features, last_layer)
    return last_layer + ridge_solver(features, tau)(missing - tau * residual)


@dataclasses.dataclass(frozen=True)
class Block:
    """The coordinates of a single output, or of all outputs if they are dependent a priori.

    Attributes:
        values: the covariance factor of the process in units of its standard deviation, [M, w, n] for w outputs.
        colored: γW [n, H w], this factor in the coordinates.
        factor: factor of the covariance of the coordinates.
    """

    values: Float[Array, "M w n"]
    colored: Float[Array, "n Hw"]
    factor: Orthonormal

    def root(self) -> Float[Array, "Hw Hw"]:
        """Λ, where ΛΛᵀ is the covariance of the coordinates."""
        return matmul(self.factor.root.T, self.factor.square_root())

    def inverse_root(self) -> Float[Array, "Hw Hw"]:
        """Λ⁻¹."""
        return matmul(self.factor.inverse_square_root(), self.factor.inverse.T)


class Coordinates:
    r"""The last layer b = b₀ + G (c + W z - Ψ b₀ - τ e) in the coordinates β = R b of the ridge regression.

    Its distribution there is

    .. math:: \beta \sim N\big(\gamma\, c,\; \gamma\, W W^\top \gamma^\top + \tau^2 Z\big), \qquad
              Z = (Q^\top Q)^{-1}, \quad \gamma = Z Q_1^\top,

    whose entries are of the order of the values of the process, however large those of b are.

    Args:
        features: Ψ [M, H].
        tau: τ.
        roots: W, as in ``LastLayerPrior``.
        num_outputs: K.

    Attributes:
        factor: of [Ψ; τI].
        gain: γ [H, M].
        blocks: one for all outputs that are alike or dependent, else one for each.
    """

    def __init__(self, features, tau, roots, num_outputs: int):
        num_points, num_features = features.shape
        self.factor = Orthonormal(features, tau * jnp.eye(num_features, dtype=features.dtype))
        self.scatter = self.factor.inverse_gram()  # Z
        self.gain = matmul(self.scatter, self.factor.q[0].T)
        rest = tau * self.factor.inverse_square_root()
        width = 1 if roots.shape[-2] == num_points else num_outputs
        rest = rest if width == 1 else jnp.kron(rest, jnp.eye(width, dtype=rest.dtype))
        self.blocks = []
        for root in roots:
            values = root.reshape(num_points, width, -1)
            colored = jnp.einsum("mwn,hm->nhw", values, self.gain, precision="highest").reshape(
                -1, num_features * width
            )
            self.blocks.append(Block(values, colored, Orthonormal(colored, rest)))


@jax.custom_vjp
def location_and_roots(features, tau, roots, center):
    r"""``(location [H, K], roots)``: the distribution N(G c, B Bᵀ) of the last layer, with a factor B of each block.

    Only functions of B Bᵀ may be differentiated, in reverse mode, because the derivative is that of the covariance:
    with the gradients a of the location and ½E of the covariance

    .. math:: \Sigma = G K G^\top + \tau^2 P, \qquad P = (\Psi^\top \Psi + \tau^2)^{-1}, \quad G = P \Psi^\top,

    the gradient of Ψ is :math:`(I - \Psi G)(c\, a^\top + K G^\top E) P - G^\top (a\, c^\top G^\top + E \Sigma)`.

    Args:
        features, tau, roots, center: as in ``LastLayerPrior``.
    """
    return _forward(features, tau, roots, center)[0]


def _forward(features, tau, roots, center):
    given = Coordinates(features, tau, roots, center.shape[1])
    inverse = given.factor.inverse
    location = matmul(inverse, matmul(given.gain, center))
    spread = [block.root() for block in given.blocks]
    by_weight = [_per_feature(inverse, root) for root in spread]
    saved = (tau, roots, center, given.factor.q, inverse, given.scatter, given.gain)
    blocks = [(b.colored, root, b.inverse_root()) for b, root in zip(given.blocks, spread, strict=True)]
    return (location, by_weight), (*saved, blocks)


def _per_feature(matrix, columns):
    """A matrix [H, H] times each output's part of columns [H w, C]."""
    return matmul(matrix, columns.reshape(len(matrix), -1)).reshape(columns.shape)


def _backward(saved, slopes):
    r"""The gradients of ``location_and_roots``, by the well-conditioned factors of the coordinates β = R b.

    There :math:`G = R^{-1} \gamma`, :math:`P = R^{-1} Z R^{-\top}`, :math:`\Psi G = Q_1 \gamma` and
    :math:`G^\top = Q_1 Z R^{-\top}`. With the gradients :math:`\bar a = R^{-\top} a` of the mean :math:`m = \gamma c`
    of β, and :math:`\bar E / 2`, :math:`\bar E = R^{-\top} E R^{-1}`, of its covariance
    :math:`\bar\Sigma = \Lambda \Lambda^\top`, the gradient of Ψ is

    .. math:: \big(L - Q_1 (\gamma L + Z (\bar a m^\top + \bar E \bar\Sigma))\big) R^{-\top}, \qquad
              L = (c\, \bar a^\top + K \gamma^\top \bar E) Z,

    that of W is :math:`\gamma^\top \bar E \gamma W`, that of c is :math:`\gamma^\top \bar a`, and that of log τ is

    .. math:: -2\, \bar a^\top T m - 2 \operatorname{tr}(\bar E\, T \bar\Sigma)
              + \tau^2 \operatorname{tr}(\bar E\, (Z + T Z)), \qquad T = \tau^2 Z R^{-\top} R^{-1}.

    The gradient of a factor B = R⁻¹Λ is E B, from which :math:`\bar E \Lambda = R^{-\top} (E B)`.
    """
    tau, roots, center, (q, q_tau), inverse, scatter, gain, blocks = saved
    num, size = q.shape
    pull = matmul(inverse.T, slopes[0])  # [H, K], the gradient of β's mean
    mean = matmul(gain, center)
    left = matmul(center, matmul(scatter, pull).T)  # L
    inner = matmul(mean, matmul(scatter, pull).T) + matmul(scatter, matmul(pull, mean.T))
    tail = matmul(matmul(scatter, q_tau.T), q_tau)  # T
    by_log_tau = -2.0 * jnp.sum(pull * matmul(tail, mean))
    by_roots = []
    for root, (colored, spread, inverse_spread), slope in zip(roots, blocks, slopes[1], strict=True):
        values = root.reshape(num, -1, colored.shape[0])
        width = values.shape[1]
        half = _per_feature(inverse.T, slope)  # ĒΛ
        whole = matmul(half, inverse_spread)  # Ē
        whole = 0.5 * (whole + whole.T)
        by_root = matmul(gain.T, matmul(whole, colored.T).reshape(size, -1))
        by_roots.append(by_root.reshape(root.shape))
        reach = jnp.einsum("mwn,nr->mwr", values, colored, precision="highest")  # Kγᵀ [M, w, Hw]
        inside = matmul(gain, reach.reshape(num, -1)).reshape(size, width, -1)  # γKγᵀ
        by_gram = jnp.einsum("hwgw->hg", matmul(half, spread.T).reshape(size, width, size, width))  # ĒΣ̄
        trace = jnp.einsum("hwgw->hg", whole.reshape(size, width, size, width))
        steps = _per_feature(scatter, whole).reshape(size, width, -1)
        left = left + jnp.einsum("mwr,hwr->mh", reach, steps, precision="highest")
        inner = inner + jnp.einsum("gwr,hwr->gh", inside, steps, precision="highest") + matmul(scatter, by_gram)
        by_log_tau += tau**2 * jnp.sum(trace * (scatter + matmul(tail, scatter))) - 2.0 * jnp.sum(tail * by_gram)
    by_features = matmul(left - matmul(q, inner), inverse.T)
    return by_features, by_log_tau / tau, jnp.stack(by_roots), matmul(gain.T, pull)


location_and_roots.defvjp(_forward, _backward)


class LastLayerPrior:
    r"""The distribution of the last layer b = b₀ + G (c + W z - Ψ b₀ - τ e) given its features, a Gaussian.

    Args:
        features: Ψ [M, H].
        tau: τ.
        roots: W, the factor of the covariance of the process in units of its standard deviation: [1, M, M], one for
            each output [K, M, M], or one for all values together [1, M K, M K].
        center: c [M, K], the mean of the process minus the offset of the network, in the same units.

    Attributes:
        size: number of white parameters of all outputs together.
    """

    #: Names of the latent sites without the prefix of the network: standardized a₀ and z, and e.
    sites = ("last_layer", "values", "residual")

    def __init__(self, features, tau, roots, center):
        self.features, self.tau, self.roots, self.center = features, jnp.asarray(tau, features.dtype), roots, center
        self.size = features.shape[1] * center.shape[1]

    def outputs(self) -> list[slice]:
        """The outputs of each block of coordinates."""
        num_points, num_outputs = self.center.shape
        if self.roots.shape[-2] != num_points:
            return [slice(None)]
        return [slice(k, k + 1) for k in range(num_outputs)]

    def last_layer(self, white: Float[Array, " R"]) -> Float[Array, "H K"]:
        """b as a function of white parameters. Only what depends on its distribution may be differentiated."""
        location, roots = location_and_roots(self.features, self.tau, self.roots, self.center)
        columns = white.reshape(-1, self.center.shape[1])
        parts = []
        for k, outputs in enumerate(self.outputs()):
            part = columns[:, outputs]
            parts.append(matmul(roots[k % len(roots)], part.reshape(-1, 1)).reshape(part.shape))
        return location + jnp.concatenate(parts, 1)

    def latents(self, white: Float[Array, " R"], key) -> dict:
        r"""Values of the sites by name, drawn from their standard normal prior given the b of these white parameters.

        With the map B = [γW, τ²(QᵀQ)⁻¹R⁻ᵀ, -τγ] from the sites to β and its covariance ΛΛᵀ, they are
        :math:`w' + B^\top \Lambda^{-\top} (c - \Lambda^{-1} B w')` for a draw w' of the prior.
        """
        given = Coordinates(self.features, self.tau, self.roots, self.center.shape[1])
        factor, gain, blocks = given.factor, given.gain, given.blocks
        tau, num_points = self.tau, len(self.center)
        columns, dtype = white.reshape(-1, self.center.shape[1]), white.dtype
        parts: dict = {site: [] for site in self.sites}
        for i, outputs in enumerate(self.outputs()):
            block = blocks[i % len(blocks)]
            num, width = len(columns), block.values.shape[1]
            keys = jax.random.split(jax.random.fold_in(key, i), 3)
            shapes = {"last_layer": (num, width), "values": (block.values.shape[2],), "residual": (num_points, width)}
            w = {k: jax.random.normal(one, shapes[k], dtype) for k, one in zip(shapes, keys, strict=True)}
            value = matmul(gain, jnp.einsum("mwn,n->mw", block.values, w["values"], precision="highest"))
            value = value + tau * factor.solve(matmul(tau * factor.inverse.T, w["last_layer"]))
            value = value - tau * matmul(gain, w["residual"])
            inverse, half = block.factor.inverse, block.factor.inverse_square_root()
            missing = columns[:, outputs].ravel() - matmul(half, matmul(inverse.T, value.ravel()[:, None]))[:, 0]
            back = matmul(inverse, matmul(half, missing[:, None])).reshape(num, width)
            pulled = matmul(gain.T, back)
            w["values"] += jnp.einsum("mwn,mw->n", block.values, pulled, precision="highest")
            w["last_layer"] += matmul(tau * factor.inverse, factor.solve(tau * back))
            w["residual"] -= tau * pulled
            w["values"] = w["values"].reshape(num_points, width)
            for site, part in w.items():
                parts[site].append(part)
        return {site: jnp.concatenate(found, 1) for site, found in parts.items()}
