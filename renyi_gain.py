"""Renyi-discriminability gain: how much of what a reward prefers each denoising step decides.

Paper: ReCAST (arXiv 2609.13425), sections 3.1-3.3, Theorem 3.1, appendices A.2, A.3, B.1-B.3.
    rho = mu / Z    D = log E_old[rho^alpha] / (alpha - 1)    gain_j = D(sigma_{j+1}) - D(sigma_j)

Glossary (level index 0 is pure noise, t = 1; the last one is clean data, t = 0)
    R     (m, T+1, P, N, K)  rewards r >= 0: m rewards, T steps, P prompts, N states, K rollouts
    mu    (m, T+1, P, N)     E_old[r(x0) | x_t]: r averaged over what the noisy state can become
    Z     one per prompt     E_old[r]
    rho                      the density ratio pi_i+ / pi_old at x_t, where pi_i+ = r_i pi_old / Z
    pi+                      the stronger common proposal that stands in for every pi_i+
    own   (m, P, M)          rewards of the policy's clean samples x0; the first N have rollouts
    probe (m, T+1, P, M)     predictors f(x_t) of own, say r(x0_hat): no rollout; last: own rescored
    D     (m, T+1)           Renyi divergence of order alpha of pi_i+ from pi_old, in nats
    gain  (m, T)             what step j adds to D, in nats
Differences from the paper, as far as we know its text
 1. Rollouts take the ancestral step: mu needs draws of x0 given x_t, an ODE gives one x0 per x_t.
 2. pool="all" takes one log over all prompts (the paper does not say); "prompt" one log each.
 3. Ours, for alpha = 2: "pair" needs neither pi+ nor an API and removes the plug-in's bias; "probe"
    needs no rollout and is a lower bound. Ours: bootstrap, shrink. Derivations: ours, tested.
Use: roll out by noised and ancestral_step, score: R; gain = renyi_gain(renyi_divergence(R)).
"""

import math
import warnings

import torch


def _level(t, x):
    """A level t, one number or one per sample, shaped to broadcast over x (B, ...)."""
    dtype = torch.promote_types(x.dtype, torch.float32)  # bf16 would turn .75 + .001 into .75
    t = torch.as_tensor(t, dtype=dtype, device=x.device)
    if t.numel() not in (1, len(x)) or not ((t >= 0) & (t <= 1)).all():
        raise ValueError(f"a level is in [0, 1], one number or one per sample ({len(x)}); got {t}")
    return t.reshape(-1, *[1] * (x.ndim - 1))  # (B or 1, 1, ...)


def noised(x0, t, noise):
    """x_t = (1 - t) x0 + t noise, the path of the rectified flow (paper 3.1), in the dtype of x0.
    x0, noise (B, ...); t in [0, 1], 0 = data, one number or (B,). ValueError for any other t."""
    t = _level(t, x0)
    return ((1 - t) * x0 + t * noise).to(x0.dtype)  # (B, ...)


# The bridge q(x_s | x_t, x0), s < t. Given x0, x_s ~ N((1-s) x0, s^2), and noise takes it on to
#   x_t = scale x_s + sqrt(var_ts) noise   with scale = (1-t)/(1-s), so that the means match,
#   scale^2 s^2 + var_ts = t^2             so that the variances match: this defines var_ts.
# Bayes, a product of two Gaussians in x_s: precisions add, means are weighted by precision.
#   1/var = scale^2/var_ts + 1/s^2 = t^2 / (var_ts s^2)                         by the line above
#   mean  = var (scale x_t/var_ts + (1-s) x0/s^2) = (scale s^2/t^2) x_t + ((1-s) var_ts/t^2) x0
# Nothing divides by 1-t: t = 1 gives scale = 0. s = 0 gives var = 0 and mean = x0.
# With x0_hat for x0, a chain of such steps draws from p(x0 | x_t) only as the steps shrink: ten
# equal ones from pure noise leave a Gaussian of standard deviation .5 with .60 of its variance.
# Test: test_ancestral_bridge_keeps_the_noising_law_of_the_true_x0
# Test: test_ancestral_sampler_reaches_the_exact_posterior_as_steps_shrink
def ancestral_step(x, v, t, s, noise):
    """One stochastic step from level t to the cleaner level s (ours: DDPM's, for this path).
    x, v, noise (B, ...), v = (noise - x0) as predicted; 0 <= s < t <= 1, numbers or (B,).
    Returns x_s (B, ...) in the dtype of x; s = 0 gives x0_hat itself. ValueError unless s < t."""
    t, s = _level(t, x), _level(s, x)
    if not (s < t).all():
        raise ValueError(f"a step goes from noise to data, s < t; got t = {t}, s = {s}")
    x0_hat = x - t * v  # (B, ...): x_t - t (noise - x0) = x0
    scale = (1 - t) / (1 - s)
    var_ts = t**2 - (scale * s) ** 2  # >= 0 after rounding too, as scale <= 1 and s < t
    mean = (scale * s**2 / t**2) * x + ((1 - s) * var_ts / t**2) * x0_hat  # (B, ...)
    return (mean + (var_ts * s**2 / t**2).sqrt() * noise).to(x.dtype)


def _refuse(bad, what):
    """ValueError that names the first reward row where bad (m, ...) is true."""
    if rows := bad.flatten(1).any(1).nonzero().flatten().tolist():
        raise ValueError(f"reward row {rows[0]} {what}")


def _checked(R, alpha, estimator, pool, own, probe):
    """R, own, probe in float64 if the call makes sense, else ValueError."""
    if not (math.isfinite(alpha) and alpha > 0 and alpha != 1):
        raise ValueError(f"alpha = {alpha}: the Renyi order must be finite, > 0 and not 1")
    if estimator not in ("positive", "self", "pair", "probe") or pool not in ("all", "prompt"):
        raise ValueError(f"{estimator!r}, {pool!r}: positive|self|pair|probe and all|prompt")
    R = torch.as_tensor(R).double()
    if R.ndim != 5 or R.shape[1] < 2 or R.numel() == 0:
        raise ValueError(f"R {tuple(R.shape)}: the shape must be (m, T+1, P, N, K), T >= 1")
    m, levels, P, N, _ = R.shape
    _refuse(~(R.isfinite() & (R >= 0)), "has a negative or non-finite value; r must be >= 0")
    _refuse(R[:, -1] != R[:, -1, ..., :1], "varies over K at the last, clean level; wrong order?")
    own = R[:, -1, ..., 0] if own is None else torch.as_tensor(own).double()
    spare = own.shape[-1] - N if own.shape[:-1] == (m, P) else -1
    if spare < 0 or spare and estimator == "probe" or not (own.isfinite() & (own >= 0)).all():
        raise ValueError(f"own {tuple(own.shape)}: not {m, P} by M >= {N} (probe: {N}), finite")
    probe = None if probe is None else torch.as_tensor(probe).double()
    if not (probe is None or probe.shape == (m, levels, *own.shape[1:]) and probe.isfinite().all()):
        raise ValueError(f"probe {tuple(probe.shape)}: the shape must be {m, levels}, P, M; finite")
    if estimator in ("pair", "probe") and (alpha != 2 or N < 2):
        raise ValueError(f"{estimator} needs alpha = 2 and N >= 2; got {alpha} and N = {N}")
    if estimator == "positive" and alpha < 1:
        _refuse(R.mean(-1) == 0, "has a zero mu, infinite to the power alpha - 1; use alpha > 1")
    if pool == "prompt" and N < 16:
        raise ValueError(f"pool='prompt' is badly biased below N = 16 states; got {N}")
    return R, own, probe


# 1. The density ratio (3.1). Noise both policies to level t with the same kernel q(x_t|x0):
#   pi_i+(x_t) = integral q(x_t|x0) r(x0) pi_old(x0) dx0 / Z   by definition of pi_i+
#              = pi_old(x_t) E_old[r(x0) | x_t] / Z            q pi_old(x0) = pi_old(x_t) p(x0|x_t)
#   so rho = mu / Z: rollouts of the policy give it, no sample of pi_i+ is needed.
# Test: test_ratio_of_the_noised_densities_is_mu_over_z
# 2. Two forms of D (3.2): as pi_old rho = pi_i+, E_old[rho^alpha] = E_{pi_i+}[rho^(alpha-1)].
# Test: test_both_moment_forms_agree
# 3. Theorem 3.1. Noising is dx = -x/(1-t) dt + sqrt(2 heat) dw, heat = t/(1-t): variance t^2.
#   Let p = pi_old(x_t), pi_i+(x_t) = rho p, h = rho^alpha. Fokker-Planck for p and for rho p:
#   dp/dt = -div(drift p) + heat lap p
#   drho/dt = -drift.grad rho + heat (lap rho + 2 grad rho.grad log p)          subtract, divide
#   d/dt integral p h = integral (h dp/dt + p h' drho/dt)                       chain rule
#   Drift: -h div(drift p) - p drift.grad h = -div(drift p h), integrates to 0: it cancels.
#   Heat, by parts: h lap p -> -h' grad p.grad rho; p h' lap rho -> the same once more and
#   -p h'' |grad rho|^2; third term +2 h' grad p.grad rho. Left: -heat E_old[h'' |grad rho|^2].
#   h'' |grad rho|^2 = alpha (alpha-1) rho^alpha |grad log rho|^2, and D = log(..)/(alpha-1), so
#   dD/dt = -alpha t/(1-t) E_old[rho^alpha |grad log rho|^2] / E_old[rho^alpha] <= 0.
#   D only grows toward data: no gain is negative, their sum is D at t = 0 (rho = 1 at t = 1).
# Test: test_theorem_3_1_equals_finite_differences_of_the_exact_divergence
def _moments(R, alpha, estimator, own, probe):
    """Per-prompt top, bottom (m, T+1, P) and power: (alpha-1) D = log top - power log bottom."""
    mu = R.mean(-1)  # (m, T+1, P, N)
    # 4. Samples of pi+ (3.3, B.1). By form 2 the exponent is alpha-1: the samples themselves carry
    # one rho. mu = Z rho, so log E[mu^(alpha-1)] / (alpha-1) = D + log Z, and log Z, the same at
    # every level, cancels in the gain. Exact for pi+ = pi_i+; for another pi+, if that quotient is
    # off by at most b at each level, the total is off by at most 2b (A.3).
    # Test: test_positive_estimator_under_the_exact_pi_plus_reaches_quadrature
    # Test: test_total_gain_under_another_proposal_errs_by_at_most_2b
    # The mean of K rollouts has mean mu, so K = 1 is unbiased at alpha = 2. Jensen bends any other
    # power p = alpha-1: E[mu_hat^p] = mu^p + p (p-1)/2 mu^(p-2) Var[r|x_t] / K + ...
    # Test: test_one_rollout_is_unbiased_at_alpha_2
    # Test: test_jensen_bias_at_alpha_3_is_as_predicted
    if estimator == "positive":
        return (mu ** (alpha - 1)).mean(-1), torch.ones_like(mu[..., 0]), 1.0
    # 5. Samples of pi_old (B.3). E_old[mu^alpha] = Z^alpha E_old[rho^alpha]. Each level is divided
    # by its own mean, or the noise of that mean swamps the gain. The plug-in trap, at alpha = 2:
    # E[mu_hat^2] = E[mu^2] + E[Var[r|x_t]] / K, too much by Var[r] / K in noise and by 0 in data,
    # so the curve is flattened and the total too low by log1p(Var[r] / (K Z^2)).
    # Test: test_self_plug_in_is_flattened_by_the_predicted_amount
    if estimator == "self":
        return (mu**alpha).mean(-1), mu.mean(-1), alpha
    # At alpha = 2, D = log(1 + Var_old[mu] / Z^2); the square of a mean is too high by its variance
    Z2 = own.mean(-1) ** 2 - own.var(-1) / own.shape[-1]  # (m, P)
    cov = explained(own[:, None], R[..., 0])[0] if estimator == "probe" else _pair(R, own, probe)
    cov[:, 0] = 0.0  # pure noise decides nothing: no rollout is needed to know it
    return Z2[:, None] + cov, Z2[:, None].expand_as(cov), 1.0


def _covariance(a, b):
    """Unbiased covariance over the last axis."""
    return ((a - a.mean(-1, True)) * (b - b.mean(-1, True))).sum(-1) / (a.shape[-1] - 1)


# 6. Pair (ours). Two independent draws of x0 from one x_t have Cov[r_1, r_2] = Var[mu] exactly; the
# clean sample is one of them: K rollouts give K + 1 draws. Analysis of variance over N states:
#   E[between] = draws Var[mu] + E[Var[r|x_t]],  E[within] = E[Var[r|x_t]]:  cov is unbiased.
# Exact for any sampler on whose own path x_t lies. With x_t = noised(x0) it needs rollouts from
# p(x0|x_t): ten equal steps, data N(0, .25): .58 of Var[r] at t = .3 where the path has .76.
# Test: test_pair_is_unbiased_where_the_plug_in_is_flattened
# Test: test_pair_is_exact_for_a_ten_step_sampler_on_its_own_path
# Control variate: for any f(x_t), Var[mu] = Var[mu - f] + 2 Cov[mu, f] - Var[f], where Cov[mu, f] =
# Cov[r, f]. The first part, small if f is good, is that of the draws r - f; the others need no
# rollout, so that many more states (M) can measure them. On the same states nothing is saved.
# Test: test_a_control_variate_keeps_the_pair_unbiased_and_saves_variance
def _pair(R, own, probe):
    """Unbiased Var_old[mu] per prompt (m, T+1, P); a probe's fitted slope costs order 1/(P M)."""
    N, draws = R.shape[3], R.shape[4] + 1
    both = torch.cat([own[:, None, :, :N, None].expand(*R.shape[:4], 1), R], -1)  # (m,T+1,P,N,K+1)
    known, f = (0.0, 0 * own[:, None]) if probe is None else explained(own[:, None], probe)
    both = both - f[..., :N, None]
    between = draws * both.mean(-1).var(-1)  # (m, T+1, P)
    within = both.var(-1).mean(-1)  # (m, T+1, P)
    cov = known + (between - within) / draws  # noise can make it negative where Var[mu] is small
    again = R[:, -1, ..., 0] if probe is None else probe[:, -1]  # one score, not K draws
    cov[:, -1] = _covariance(own[..., :again.shape[-1]], again)
    return cov


# 7. Probe (ours). Cauchy-Schwarz: Var[mu] >= Cov[mu, f]^2 / Var[f] = Cov[r, f]^2 / Var[f], for any
# f(x_t): what the best line slope f explains, 2 Cov[r, slope f] - Var[slope f]. Fitting it to the
# same P (M-1) degrees of freedom adds residual variance / (P (M-1)): off, as in an adjusted R^2.
# Test: test_probe_is_a_lower_bound_and_exact_for_a_linear_predictor
def explained(r, f):
    """Variance (..., P) of r (..., P, M) that slope * f (..., P, M) explains, one slope for all P
    prompts, and slope * f itself; 0 for a constant f. Leading axes broadcast: r[:, None] and
    f[None] compare every reward with every predictor. Ours; a lower bound of Var_old[mu]."""
    cov, var = _covariance(r, f), _covariance(f, f)  # (..., P)
    least = 1e-20 * f.square().sum((-2, -1))[..., None]  # a constant f has var by rounding
    slope = torch.where(var.sum(-1, True) > least, cov.sum(-1, True) / var.sum(-1, True), 0.0)
    part = 2 * slope * cov - slope**2 * var  # (..., P)
    free = r.shape[-2] * (r.shape[-1] - 1) - 1
    return part - (_covariance(r, r) - part) * (slope != 0) / free, slope[..., None] * f


def _divergence(top, bottom, power, alpha, pool, weight):
    """D (S, m, T+1) for S weightings (S, P) of the prompts, each summing to 1; kept (m, 1, P)."""
    kept = ((top > 0) & (bottom > 0)).all(1, keepdim=True) | (pool == "all")  # (m, 1, P)
    if pool == "all":
        D = (top @ weight.T).log() - power * (bottom @ weight.T).log()  # (m, T+1, S)
    else:
        log_ratio = (top.log() - power * bottom.log()).where(kept, 0.0)  # (m, T+1, P)
        D = log_ratio @ weight.T / (kept.double() @ weight.T)  # (m, T+1, S)
    D = D.permute(2, 0, 1) / (alpha - 1)  # (S, m, T+1)
    return D - D[..., :1], kept


def renyi_divergence(R, alpha=2.0, estimator="positive", pool="all", own=None, probe=None):
    """D (m, T+1) in nats, float64, 0 in pure noise: what a reward has decided by each level.
    R (m, T+1, P, N, K), finite, >= 0; at the last level all K entries are the clean sample's own.
    estimator: "positive", states from a proposal pi+ (paper 3.3, B.1); "self", from the policy,
    plug-in (B.3); "pair", from the policy, moments unbiased (ours; alpha = 2, N >= 2), with probe
    as a control variate; "probe" (ours; alpha = 2), R a predictor of own, K = 1: a lower bound.
    own (m, P, M >= N): a first score of the clean samples, default R[:, -1]; probe (m, T+1, P, M).
    pool: "all", one log of the mean moment: prompts weigh by Z^(alpha-1) ("positive") or Z^alpha;
    "prompt" (ours), the mean of one log each, N >= 16, still biased by noise; prompts with a moment
    that is not positive are left out, and a warning counts them.
    ValueError: bad alpha, shapes or R; a zero mu at alpha < 1; a moment that is not positive."""
    R, own, probe = _checked(R, alpha, estimator, pool, own, probe)
    weight = R.new_full((1, R.shape[2]), 1 / R.shape[2])
    D, kept = _divergence(*_moments(R, alpha, estimator, own, probe), alpha, pool, weight)
    _refuse(~D[0].isfinite(), "has a moment that is not positive: r all zero, or too few states")
    for i, count in enumerate((~kept).sum((1, 2)).tolist()):
        if count:
            warnings.warn(f"reward row {i}: {count} of {R.shape[2]} prompts dropped", stacklevel=2)
    return D[0]  # (m, T+1)


def renyi_gain(D):
    """gain (m, T) in nats: D (m, T+1) differenced toward data (paper 3.2); sums to D[:, -1]."""
    return D.diff(dim=-1)


def shrink(gain, stderr):
    """gain (m, T), each row's deviations from its mean times max(0, 1 - sum stderr^2 / their sum of
    squares): all noise becomes flat. Ours, after James and Stein. NaN stderr: as it is."""
    mean = gain.mean(-1, keepdim=True)  # (m, 1)
    ratio = stderr.square().sum(-1) / (gain - mean).square().sum(-1)  # (m,), 0/0 for a flat row
    keep = torch.where(stderr.isnan().any(-1), 1.0, (1 - ratio).clamp(min=0).nan_to_num())
    return mean + keep[:, None] * (gain - mean)


def bootstrap(R, alpha=2.0, estimator="positive", pool="all", own=None, probe=None, n_boot=200,
              seed=0):
    """D (n_boot, m, T+1) in nats on redrawn prompts (ours): .std(0) is the standard error of D,
    .diff(dim=-1).std(0) of the gain. The same prompts for all levels and rewards; everything is
    recomputed from their moments, except the slope of a probe. NaN for P = 1 and, with a warning,
    for a reward that has no positive moment in some redraw. Arguments, errors: renyi_divergence."""
    R, own, probe = _checked(R, alpha, estimator, pool, own, probe)
    P = R.shape[2]
    drawn = torch.randint(P, (n_boot, P), generator=torch.Generator().manual_seed(seed))
    weight = torch.zeros(n_boot, P).scatter_add_(1, drawn, torch.ones(n_boot, P)).to(R) / P
    D, _ = _divergence(*_moments(R, alpha, estimator, own, probe), alpha, pool, weight)
    for i, count in enumerate((~D.isfinite()).any(-1).sum(0).tolist()):
        if count:
            warnings.warn(f"reward row {i}: NaN, no moment in {count} redraws", stacklevel=2)
    return D * torch.nan if P == 1 else D  # (n_boot, m, T+1)
