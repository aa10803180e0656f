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
Call `W, residual = sinkhorn(gain, lam)`, or look at a curve file that estimate.py wrote:
    python sinkhorn.py curves/toy-ocr.safetensors --lam 2,1,1,1 --plot W.png
"""

import argparse
import math
import os
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


def plot_weights(path, W, lam, sigmas, names):
    """PNG of W beside W - lam_bar/T in units of 1/(mT), marginals on the axes, noise at the left;
    sigmas (T+1,), names (m,). Written beside `path` first and renamed, so never half a file."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    m, T = W.shape
    figure = Figure(figsize=(2.5 + 0.9 * max(T, 8), 1.6 + 0.42 * m), layout="constrained")
    panels = {"W, in 1/(mT)": W, "W - lam_bar/T, in 1/(mT)": W - static_weights(lam, T)}
    for k, (title, value) in enumerate(panels.items()):
        rows, columns = (x.round(decimals=3) + 0.0 for x in (value.sum(1), T * value.sum(0)))
        value = (value * m * T).numpy()  # (m, T), 1 everywhere for equal budgets and flat curves
        top = max(abs(value).max(), 0.1)
        axes = figure.add_subplot(1, 2, k + 1, title=title)
        axes.imshow(value, aspect="auto", cmap="RdBu_r" if k else "Blues", vmin=-top * k, vmax=top)
        for i, j in ((i, j) for i in range(m) for j in range(T)):
            ink = "white" if abs(value[i, j]) > 0.6 * top else "black"
            axes.text(j, i, f"{value[i, j]:.2f}", ha="center", va="center", color=ink, size=7)
        axes.set_yticks(range(m), [f"{names[i]}\nsum {rows[i]:.3f}" for i in range(m)], size=8)
        axes.set_xticks(range(T), [f"{sigmas[j]:.3f}\n{columns[j]:.2f}" for j in range(T)], size=7)
        axes.set_xlabel("<- noise        sigma, below it T x column sum        data ->", size=8)
    figure.savefig(f"{path}.part", format="png", dpi=100)
    os.replace(f"{path}.part", path)


def main(argv=None):
    """The command line: a curve file and budgets in; W, its marginals and its residual out."""
    from safetensors import SafetensorError, safe_open

    parser = argparse.ArgumentParser(usage="sinkhorn.py CURVE --lam 2,1,1,1 [--tau 1] [--plot PNG]")
    parser.error = lambda message: parser.exit(2, f"error: {message}; usage: {parser.usage}\n")
    parser.add_argument("curve", help="curve file (.safetensors) written by estimate.py")
    parser.add_argument("--lam", required=True, help="budgets >= 0: 2,1,1,1",
                        type=lambda text: [float(number) for number in text.split(",")])
    parser.add_argument("--tau", type=float, default=1.0, help="temperature > 0 (default 1)")
    parser.add_argument("--plot", help="PNG to write (default: none)")
    args = parser.parse_args(argv)
    folder = os.path.dirname(os.path.abspath(args.plot or "")) + "/"
    if args.plot and not (args.plot.endswith(".png") and os.access(folder, os.W_OK)):
        parser.error(f"--plot {args.plot}: expected a .png in an existing, writable folder")
    try:
        with safe_open(args.curve, "pt") as file:
            names = (file.metadata() or {}).get("rewards", "").split(",")
            gain, stderr, D, sigmas = map(file.get_tensor, ["gain", "stderr", "D", "sigmas"])
        m, T = len(names), sigmas.numel() - 1
        if not (gain.shape == stderr.shape == (m, T) and D.shape == (m, T + 1)):
            raise ValueError(f"{m} reward names, {T + 1} sigmas, gain of shape {[*gain.shape]}")
        W, residual = sinkhorn(gain, args.lam, args.tau)
        if args.plot:
            plot_weights(args.plot, W, args.lam, sigmas, names)
    except (OSError, SafetensorError, ValueError) as error:
        where = "--" if str(error)[:3] in ("lam", "tau") else f"{args.curve}: expected a curve; "
        parser.error(f"{where}{error}")
    print(f"W in units of 1/(mT), tau {args.tau:g}, steps from noise to data")
    print("step  sigma" + "".join(f"{name:>15}" for name in names) + "  T x column sum")
    for j in range(T):
        cells = "".join(f"{w:15.3f}" for w in m * T * W[:, j])
        print(f"{j:4d}  {sigmas[j]:.3f}{cells}  {T * W[:, j].sum():14.6f}")
    print("row sum    " + "".join(f"{s:15.6f}" for s in W.sum(1)))
    print(f"residual {residual:.1e}, W from {m * T * W.min():.2f} to {m * T * W.max():.2f} / (mT)")


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    main()
