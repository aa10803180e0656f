"""Budgets and gain curves in, ReCAST's weight matrix W out (paper 3.4, C.1 and C.2).

    W = argmin KL(W || K)   subject to   sum_j W_ij = lam_bar_i   and   sum_i W_ij = 1/T
    K_ij = exp(ghat_ij / tau),   ghat_ij = gain_ij / mean_j gain_ij,   lam_bar = lam / sum(lam)

name      shape   meaning
gain      (m, T)  what step j adds to reward i's discriminability; column 0 is the noisiest step
lam       (m,)    budgets >= 0 of the user, any unit: how much each reward counts in all
W         (m, T)  weight of reward i at step j; the whole matrix sums to 1
tau       ()      temperature: inf gives the static lam_bar_i / T, 0 optimal transport
f, g      (m,), (T,)  potentials, the logs of the scalings u and v in W = diag(u) K diag(v)

Differences from the paper: (1) tau = 1 is our choice, the paper's value is not known to us; (2) a
curve whose total is not positive counts as no curve, with a warning; (3) a zero budget gives zeros.
Call `W, residual = sinkhorn(gain, lam)`; `estimate.py --show` draws the W of a curve file.
"""

import math
import warnings

import torch


def _float64(name, value, shape, ndim):
    """`value` as a CPU float64 tensor with `ndim` axes, or a ValueError that names the argument."""
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected numbers, shape {shape}; {error}") from None
    if tensor.ndim != ndim or tensor.numel() == 0:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return tensor


def _log_kernel(gain, tau):
    """log K (m, T). A reward without a curve gets a constant row, which prefers no step."""
    gain = _float64("gain", gain, "(m, T), one row per reward", 2)  # (m, T)
    if not tau > 0:  # also true for NaN
        raise ValueError(f"tau: expected a temperature > 0, got {tau}")
    log_K = torch.zeros_like(gain)  # (m, T)
    for i, row in enumerate(gain):
        if row.isnan().all():
            continue
        if not row.isfinite().all():
            raise ValueError(f"gain: row {i} must be all finite, or all NaN (no curve)")
        row = row / row.abs().max()  # (T,), no overflow below; an all-zero row becomes NaN
        if not row.sum() > 1e-12:  # not 0: .1 + .2 - .3 is 5.6e-17 in floating point
            warnings.warn(f"gain: row {i} has no positive total, taken as flat", stacklevel=3)
            continue
        # Only the shape of a curve counts: the mean takes out the reward's own unit.
        # Test: test_scaling_the_gains_of_one_reward_changes_nothing
        log_K[i] = row / row.mean() / tau
    if not log_K.isfinite().all():
        raise ValueError(f"tau: {tau} is too small, gain / tau overflows; expected .001 or more")
    return log_K


def _normalised(lam, m=None):
    """lam_bar (m,): the budgets divided by their sum."""
    lam = _float64("lam", lam, "(m,), one budget per reward", 1)  # (m,)
    if m is not None and len(lam) != m:
        raise ValueError(f"lam: expected {m} budgets, one per reward, got {len(lam)}")
    if not lam.isfinite().all() or (lam < 0).any() or not (lam > 0).any():
        raise ValueError(f"lam: expected finite numbers >= 0, not all zero, got {lam.tolist()}")
    lam = lam / lam.max()  # (m,), so that the sum cannot overflow
    return lam / lam.sum()


def sinkhorn(gain, lam, tau=1.0, tol=1e-9, max_iter=10_000):
    """W (m, T), row sums lam / sum(lam), column sums 1/T; and its largest error in any of them.

    gain (m, T): each row finite, or NaN throughout for a reward without a curve (constant kernel
    row); lam (m,) >= 0; tau > 0, inf allowed; tol > 0, absolute. W is float64 on the CPU.
    Warns when residual > tol after max_iter sweeps; a ValueError names the argument that is wrong.
    Sweeps for m <= 4, T <= 25: under 100 (paper C.1), 7 to 18 on random curves; at tau = .03 up to
    60,000, when budgets fit whole steps."""
    log_K = _log_kernel(gain, tau)  # (m, T)
    T, lam_bar = log_K.shape[1], _normalised(lam, len(log_K))  # (), (m,)
    if not (tol > 0 and max_iter >= 1):
        raise ValueError(f"tol, max_iter: expected > 0 and >= 1, got {tol} and {max_iter}")
    # Lagrangian: sum_ij W_ij (log W_ij - log K_ij - 1), minus f_i, g_j times the constraints;
    # d/dW_ij = log W_ij - log K_ij - f_i - g_j = 0, hence W_ij = exp(f_i + log K_ij + g_j).
    # Put it into each constraint and solve for that constraint's own potential:
    #   e^f_i sum_j exp(log K_ij + g_j) = lam_bar_i   ->   f_i = log lam_bar_i - logsumexp_j(...)
    #   e^g_j sum_i exp(log K_ij + f_i) = 1/T         ->   g_j = -log T - logsumexp_i(...)
    # Alternating is coordinate ascent on the concave dual, and KL is strictly convex in W: one
    # end, whatever the start. In logs because exp(ghat / tau) reaches e^2500 at T = 25, tau = .01.
    # Test: test_sinkhorn_equals_a_direct_minimiser_of_the_kl
    g = torch.zeros(T, dtype=torch.float64)  # (T,)
    for _ in range(int(max_iter)):
        f = lam_bar.log() - torch.logsumexp(log_K + g, dim=1)  # (m,), -inf for a zero budget
        g = -math.log(T) - torch.logsumexp(log_K + f[:, None], dim=0)  # (T,)
        W = torch.exp(f[:, None] + log_K + g)  # (m, T), g came last: columns exact, rows to tol
        residual = torch.cat([W.sum(1) - lam_bar, W.sum(0) - 1 / T]).abs().max().item()
        if residual <= tol:
            break
    else:
        warnings.warn(f"residual {residual:.1e} > tol: raise max_iter or tau", stacklevel=2)
    # C.2. All flat: K has rank one, W_ij = lam_bar_i / T. Test: test_flat_is_static
    # No curve: log K_ij is constant in j, W_ij follows the shared e^g_j.
    # Test: test_a_reward_without_a_curve_follows_the_shared_column_scaling
    # tau -> 0: tau KL(W || K) = -sum_ij W_ij ghat_ij - tau * entropy(W) becomes transport: step j
    # goes to argmax_i (ghat_ij - price_i), with prices that make the budgets fit.
    # Test: test_small_tau_reaches_the_transport_solution
    return W, residual


def static_weights(lam, T):
    """W (m, T) = lam_bar_i / T, float64: the paper's static baseline, and what flat curves give."""
    if not (T >= 1 and T % 1 == 0):
        raise ValueError(f"T: expected a whole number of steps, at least 1, got {T}")
    return _normalised(lam)[:, None].repeat(1, int(T)) / T  # (m, T)


def row_weights(gain, lam, tau=1.0):
    """W (m, T) = lam_bar_i * softmax_j(ghat_ij / tau), float64: the ablation without Sinkhorn
    (paper 4.5). Rows keep their budgets, columns are free. Arguments and errors as in sinkhorn."""
    log_K = _log_kernel(gain, tau)  # (m, T)
    return _normalised(lam, len(log_K))[:, None] * log_K.softmax(dim=1)  # (m, T)
