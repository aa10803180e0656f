"""From rewards to a gradient: advantage, optimality r, credit by W, loss (paper A.1; DiffusionNFT).

    x_t = (1-t) x0 + t noise,   target = noise - x0,   x0_hat(v) = x_t - t v
    v+ = (1-beta) v_old + beta v,   v- = (1+beta) v_old - beta v
    L(r) = r |v+ - target|^2 + (1-r) |v- - target|^2
    step j trains on coef_j L(r_mix),  coef_j = T sum_i W_ij,  r_mix = sum_i W_ij r_i / sum_i W_ij

name      shape           meaning
v, v_old  (B, ...)        velocity at x_t of the trained policy and of the old one, which sampled x0
xt, x0    (B, ...)        noisy state and clean sample
t         (B,) in [0, 1]  noise level, 0 = data, 1 = noise
r         (B,) in [0, 1]  optimality: how much the sample counts as one of the positive policy
W, j      (m, T), (B,)    ReCAST's weights, and the step of each image, 0 = noisiest

Differences from the paper: (1) the x0 form, adaptive weight and 1/beta of DiffusionNFT's public
code, derived below; (2) means over elements, not sums; (3) no KL term and no factor clip here, the
training loop says what it adds; (4) rewards that are not finite and columns of zeros are defined.

    r_mix, coef = credit(W, j, optimality(group_advantage(rewards, group)))  # (B,), (B,)
    loss = (coef * nft_loss(v, v_old, xt, x0, t, r_mix)).mean()
"""

import math

import torch


def group_advantage(reward, group, std="global", eps=1e-4):
    """(reward - mean of its group) / (std + eps), float64, shape of `reward`.

    reward (B,) or (m, B): rows are normalised one by one, so a reward's unit drops out (up to eps).
    group (B,): integers, the index of the drawn prompt, never its text (texts can coincide).
    B is the whole batch: gather over ranks first. std "global": of all B raw rewards of the row,
    "group": of each group; ddof 0. Constant groups and groups of one image: exactly 0.
    NaN and inf get 0 and enter no mean or std (ours); ValueError for a row with nothing finite.
    Source: DiffusionNFT's code has both kinds of std; one row per reward is ours."""
    reward = torch.as_tensor(reward, dtype=torch.float64).detach()
    if reward.ndim not in (1, 2) or reward.numel() == 0:
        raise ValueError(f"reward: expected shape (B,) or (m, B), got {tuple(reward.shape)}")
    rows = reward.reshape(-1, reward.shape[-1])  # (m, B)
    group = _integers("group", group, rows[0])  # (B,)
    if std not in ("global", "group"):
        raise ValueError(f"std: expected 'global' or 'group', got {std!r}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps: expected a number > 0, got {eps}")
    advantage = torch.zeros_like(rows)  # (m, B)
    for i, row in enumerate(rows):
        finite = row.isfinite()  # (B,)
        if not finite.any():
            raise ValueError(f"reward: row {i} holds no finite value, expected at least one")
        for k in group[finite].unique():
            own = finite & (group == k)  # (B,)
            # Two passes: E[x^2] - mean^2 cancels at a large offset and turns equal rewards into
            # large advantages.  Test: test_constant_groups_get_exactly_zero_at_any_offset
            scale = _centred(row[own if std == "group" else finite]).square().mean().sqrt()
            advantage[i, own] = _centred(row[own]) / (scale + eps)
    return advantage.reshape(reward.shape)


def _centred(x):
    """x - mean(x), and exactly 0 for equal entries: the mean of three times .1 is not .1."""
    x = x - x.min()
    return x - x.mean()


def _integers(name, value, like):
    """`value` as integers, shape and device of `like`; or a ValueError that names the argument."""
    try:
        value = torch.as_tensor(value, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}: expected integers, got {value!r:.60}") from None
    if value.shape != like.shape or value.dtype.is_floating_point or value.dtype == torch.bool:
        raise ValueError(f"{name}: expected {len(like)} integers, got {value.dtype} of shape "
                         f"{tuple(value.shape)}")
    return value


def _check_unit(name, value):
    """ValueError unless every entry is in [0, 1]; NaN is not."""
    if not ((value >= 0) & (value <= 1)).all():
        raise ValueError(f"{name}: expected numbers in [0, 1], got {value.min()} to {value.max()}")


def optimality(advantage, clip=5.0):
    """r = 1/2 + 1/2 clip(advantage / clip, -1, 1), float64 in [0, 1], any shape.

    -inf, -clip, 0, clip, inf become 0, 0, 1/2, 1, 1. NaN is a ValueError: group_advantage makes
    none, so it is a fault upstream, and 1/2 would hide it. Source: DiffusionNFT (clip 5)."""
    if not 0 < clip < math.inf:
        raise ValueError(f"clip: expected a number > 0, got {clip}")
    advantage = torch.as_tensor(advantage, dtype=torch.float64)
    if advantage.isnan().any():
        raise ValueError("advantage: expected no NaN")
    return 0.5 + 0.5 * (advantage / clip).clamp(-1, 1)


def credit(W, j, r):
    """r_mix (B,) in [0, 1] and coef (B,) >= 0, float64: what each image trains on at its own step.

    W (m, T) >= 0; j (B,) integers, 0 <= j < T, 0 = noisiest; r (m, B) in [0, 1]; ValueErrors name
    the argument. A zero column gives r_mix = 1/2, coef = 0: nothing to learn. Source: paper 3.4."""
    r = torch.as_tensor(r, dtype=torch.float64)
    W = torch.as_tensor(W, dtype=torch.float64, device=r.device)
    if W.ndim != 2 or r.ndim != 2 or len(W) != len(r):
        raise ValueError(f"W, r: expected (m, T) and (m, B), got {[*W.shape]} and {[*r.shape]}")
    if not (W.isfinite().all() and (W >= 0).all()):
        raise ValueError("W: expected finite numbers >= 0")
    _check_unit("r", r)
    j = _integers("j", j, r[0])  # (B,)
    if not ((j >= 0) & (j < W.shape[1])).all():
        raise ValueError(f"j: expected steps 0 to {W.shape[1] - 1}, got {j.min()} to {j.max()}")
    # L(r) = L(0) + r (L(1) - L(0)) is affine, so weighting losses is weighting rewards:
    #   sum_i W_ij L(r_i) = (sum_i W_ij) L(0) + (sum_i W_ij r_i) (L(1) - L(0)) = c_j L(r_mix),
    # with c_j = sum_i W_ij = 1/T for equal columns. coef = T c_j leaves such columns at the plain
    # loss.  Test: test_weighting_losses_is_weighting_rewards
    # The price: if the r_i are independent with equal spread, r_mix has sqrt(sum_i w_i^2) of it,
    # w_i = W_ij / c_j: 1/sqrt(m) of one reward's contrast |2r - 1| for equal weights, with static
    # weights as with ReCAST.  Test: test_a_mix_of_m_rewards_has_one_over_root_m_of_the_contrast
    w = W[:, j.long()]  # (m, B)
    total = w.sum(0)  # (B,), c_j
    r_mix = torch.where(total > 0, (w * r).sum(0) / total, 0.5)  # (B,)
    coef = W.shape[1] * total  # (B,)
    # Within 1e-6 of 1 is 1: so little is rounding (float32 files, the solver's tol), not a wish.
    # Test: test_equal_columns_give_a_coefficient_of_exactly_one
    return r_mix, torch.where((coef - 1).abs() < 1e-6, 1.0, coef)


def nft_loss(v, v_old, xt, x0, t, r, beta=1.0, adaptive=True):
    """DiffusionNFT's loss per image, (B,) float64; the gradient reaches v only.

    v, v_old, xt, x0 (B, ...) of any float type; t, r (B,) in [0, 1]; beta > 0 is the width of the
    interpolation (public recipes: 1 or .1), not the KL weight. ValueError for shapes and beta; t
    and r are looked at on the CPU only, on a GPU that would stall it. inf or NaN in v passes on.
    Source: paper A.1; x0 form, adaptive weight and 1/beta from DiffusionNFT's public code."""
    _check(v, v_old, xt, x0, t, r, beta)
    v = v.double().flatten(1)  # (B, n)
    v_old, xt, x0 = (x.detach().double().flatten(1) for x in (v_old, xt, x0))  # (B, n) each
    t, r = t.double()[:, None], r.double()  # (B, 1), (B,)
    # From the printed form to the x0 form: x_t - x0 = t (noise - x0) = t target, so
    #   x0_hat(v+) - x0 = x_t - t v+ - x0 = t (target - v+),   |.|^2 = t^2 |v+ - target|^2,
    # and v- likewise. Divided by beta this is t^2/beta times the printed loss (adaptive=False).
    # Test: test_x0_form_is_t_squared_over_beta_times_the_velocity_form
    positive = xt - t * ((1 - beta) * v_old + beta * v) - x0  # (B, n), x0_hat(v+) - x0
    negative = xt - t * ((1 + beta) * v_old - beta * v) - x0  # (B, n), x0_hat(v-) - x0
    # Gradient at v = v_old, where both are e = t (target - v_old): d positive/dv = -t beta and
    # d negative/dv = t beta give dL/dv = (2/n) (-r + (1-r)) t e = (2/n) t^2 (2r-1) (v_old - target)
    # for any beta, while L = |e|^2 / (n beta) for any r: a flat loss is not a dead run.
    # Test: test_gradient_at_the_old_policy_is_proportional_to_2r_minus_1
    # Minimiser (adaptive=False): 0 = E[r (v+ - target) - (1-r) (v- - target) | x_t], where v+ and
    # v- are v_old +- beta (v - v_old), gives v = v_old + E[(2r-1) (target - v_old) | x_t] / beta;
    # if v_old = E[target | x_t] that is v_old + (2/beta) Cov(r, target | x_t).
    # Test: test_minimiser_is_the_old_velocity_plus_the_reward_covariance
    positive, negative = _mean_square(positive, adaptive), _mean_square(negative, adaptive)  # (B,)
    return (r * positive + (1 - r) * negative) / beta  # affine in r: see credit


def _mean_square(error, adaptive):
    """Mean over an image of error^2, (B, n) to (B,); if adaptive, divided by that of |error|."""
    if not adaptive:
        return error.square().mean(1)
    # sg(mean |error|), one number per image, evens out noise levels: error grows like t, the
    # quotient like t, not t^2. sg is stop-gradient: the weight is a constant to the derivative.
    # The clip makes a perfect prediction 0 and not 0/0.  Test: test_adaptive_weight_is_per_image
    return error.square().mean(1) / error.detach().abs().mean(1).clamp(min=1e-5)


def _check(v, v_old, xt, x0, t, r, beta):
    """ValueErrors of nft_loss."""
    if not (v.ndim > 1 and v.shape == v_old.shape == xt.shape == x0.shape):
        shapes = [[*x.shape] for x in (v, v_old, xt, x0)]
        raise ValueError(f"v, v_old, xt, x0: expected one shape (B, ...), got {shapes}")
    if not (t.shape == r.shape == v.shape[:1]):
        raise ValueError(f"t, r: expected shape ({len(v)},), got {[*t.shape]} and {[*r.shape]}")
    if not 0 < beta < math.inf:
        raise ValueError(f"beta: expected a number > 0, got {beta}")
    for name, value in (("t", t), ("r", r)):
        if value.device.type == "cpu":
            _check_unit(name, value)


def old_policy_decay(step, recipe):
    """d in old <- d old + (1-d) new after an epoch; step counts optimiser steps from 0.

    recipe 1: min(.001 step, .5); recipe 2 (used with beta = .1): 0 below step 75, then
    min(.0075 (step - 75), .999). 0 copies, 1 would freeze. Source: DiffusionNFT's public code."""
    if not step >= 0 or recipe not in (1, 2):
        raise ValueError(f"step, recipe: expected step >= 0, recipe 1 or 2, got {step}, {recipe!r}")
    return min(0.001 * step, 0.5) if recipe == 1 else min(0.0075 * max(step - 75, 0), 0.999)
