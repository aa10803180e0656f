"""Tests, in the order of the paper: names are claims, oracles are independent of the code.

    python -m pytest -q test_all.py            # README has the time
"""

import contextlib
import copy
import functools
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # before torch looks

import numpy as np
import ot
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.optimize import isotonic_regression, linprog, minimize

import estimate
import evaluate
import nft_loss as nft
import rewards
import sinkhorn as sk
import toy
import train
from renyi_gain import (
    ancestral_step,
    bootstrap_stderr,
    monotone,
    noised,
    renyi_divergence,
    renyi_gain,
)

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------ renyi_gain.py
# Two worlds with known answers.
# Gaussian: x0 ~ N(0, 1), r = 1 + CV x0. The noisy state decides the share R2 of the variance of r.
# Mixture: two Gaussians in 1-D, r = FLOOR + a Gaussian bump, so pi_i+ is a mixture as well.

SEVEN = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.3, 0.1, 0.0], dtype=torch.float64)
CV = 0.2


def share_decided(t):
    return (1 - t) ** 2 / ((1 - t) ** 2 + t**2)


def gaussian_rewards(levels, P, N, K, seed, positive=False, spread=0.0):
    """R (1, T+1, P, N, K) from exact posterior draws; spread makes prompts differ by a factor."""
    rng = torch.Generator().manual_seed(seed)
    x0 = torch.randn(P, N, generator=rng, dtype=torch.float64)
    if positive:  # density (1 + CV x) N(x): keep the sign with probability (1 + CV x) / 2
        keep = torch.rand(P, N, generator=rng, dtype=torch.float64) < (1 + CV * x0) / 2
        x0 = torch.where(keep, x0, -x0)
    factor = torch.exp(spread * torch.randn(P, 1, 1, generator=rng, dtype=torch.float64))
    R = []
    for t in levels.tolist():
        xt = (1 - t) * x0 + t * torch.randn(P, N, generator=rng, dtype=torch.float64)
        share, draw = share_decided(t), torch.randn(P, N, K, generator=rng, dtype=torch.float64)
        center = xt / (1 - t) * share if t < 1 else torch.zeros_like(xt)
        x = center[..., None] + math.sqrt(1 - share) * draw if t > 0 else x0[..., None] + 0 * draw
        R.append(factor * (1 + CV * x).clamp(min=0))
    return torch.stack(R)[None]


FLOOR, BUMP, WIDTH = 0.1, 1.0, 0.3
OLD = tuple(torch.tensor(row, dtype=torch.float64) for row in ([0.6, 0.4], [-1, 1.2], [0.16, 0.25]))


def bump_reward(x):
    return FLOOR + torch.exp(-((x - BUMP) ** 2) / (2 * WIDTH**2))


def tilted(mix):
    """The mixture r pi_old / Z, and Z: a Gaussian times the bump is a Gaussian."""
    w, m, v = mix
    mass = w * WIDTH / (WIDTH**2 + v).sqrt() * torch.exp(-((m - BUMP) ** 2) / 2 / (WIDTH**2 + v))
    Z = FLOOR + mass.sum()
    v2 = 1 / (1 / v + 1 / WIDTH**2)
    m2 = v2 * (m / v + BUMP / WIDTH**2)
    return (torch.cat([FLOOR * w, mass]) / Z, torch.cat([m, m2]), torch.cat([v, v2])), Z


PLUS, Z_OLD = tilted(OLD)
GRID = torch.linspace(-8, 8, 3201, dtype=torch.float64)
STEP = GRID[1] - GRID[0]


def density(mix, x, t):
    """The density of (1-t) x0 + t noise for x0 from the mixture."""
    w, m, v = mix
    m, v = (1 - t) * m, (1 - t) ** 2 * v + t**2
    return (w * torch.exp(-((x[..., None] - m) ** 2) / (2 * v)) / (2 * math.pi * v).sqrt()).sum(-1)


def exact_D(alpha, t):
    p, q = density(OLD, GRID, t), density(PLUS, GRID, t)
    return torch.log((p * (q / p) ** alpha).sum() * STEP) / (alpha - 1)


def mixture_sample(mix, shape, rng):
    w, m, v = mix
    k = torch.multinomial(w, math.prod(shape), replacement=True, generator=rng).reshape(shape)
    return m[k] + v[k].sqrt() * torch.randn(shape, generator=rng, dtype=torch.float64)


def mixture_rewards(levels, P, N, K, seed, source=PLUS):
    """R (1, T+1, P, N, K): x0 from source, rollouts exact posterior draws under OLD."""
    rng = torch.Generator().manual_seed(seed)
    w, m, v = OLD
    x0, R = mixture_sample(source, (P, N), rng), []
    for t in levels.tolist():
        xt = (1 - t) * x0 + t * torch.randn(P, N, generator=rng, dtype=torch.float64)
        vt = (1 - t) ** 2 * v + t**2
        gap = xt[..., None] - (1 - t) * m  # (P, N, 2)
        odds = w / vt.sqrt() * torch.exp(-(gap**2) / (2 * vt))
        pick = torch.rand(P, N, K, generator=rng, dtype=torch.float64)
        k = (pick > (odds[..., :1] / odds.sum(-1, keepdim=True))).long()  # (P, N, K)
        center = (m + (1 - t) * v / vt * gap).gather(-1, k)
        scale = (v * t**2 / vt).sqrt()[k]
        x = center + scale * torch.randn(P, N, K, generator=rng, dtype=torch.float64)
        R.append(bump_reward(x if t > 0 else x0[..., None].expand_as(x)))
    return torch.stack(R)[None]


# --- the mathematics, by quadrature


def test_ratio_of_the_noised_densities_is_mu_over_z():
    for t in (0.1, 0.4, 0.9, 1.0):
        xt = torch.linspace(-2.5, 2.5, 41, dtype=torch.float64)
        joint = torch.exp(-((xt[:, None] - (1 - t) * GRID) ** 2) / (2 * t**2))
        joint = joint * density(OLD, GRID, 0)  # (x_t, x0), up to a constant
        mu = (joint * bump_reward(GRID)).sum(1) / joint.sum(1)  # E_old[r | x_t] by Bayes
        Z = (density(OLD, GRID, 0) * bump_reward(GRID)).sum() * STEP
        torch.testing.assert_close(
            density(PLUS, xt, t) / density(OLD, xt, t), mu / Z, rtol=1e-8, atol=0
        )


@pytest.mark.parametrize("alpha", [0.5, 2.0, 4.0])
def test_both_moment_forms_agree(alpha):
    for t in (0.2, 0.5, 0.9):  # mu by Bayes in the first, the noised density of pi_i+ in the second
        xt = GRID[::4]
        p, q = density(OLD, xt, t), density(PLUS, xt, t)
        joint = torch.exp(-((xt[:, None] - (1 - t) * GRID) ** 2) / (2 * t**2))
        joint = joint * density(OLD, GRID, 0)
        rho = (joint * bump_reward(GRID)).sum(1) / joint.sum(1).clamp(min=1e-300) / Z_OLD
        first = (p * rho**alpha).sum()
        second = (q * (q / p) ** (alpha - 1)).sum()
        assert abs(first / second - 1) < 1e-8


@pytest.mark.parametrize("alpha", [0.5, 2.0, 4.0])
def test_theorem_3_1_equals_finite_differences_of_the_exact_divergence(alpha):
    for t in (0.15, 0.5, 0.85):
        x = GRID.clone().requires_grad_()
        log_rho = (density(PLUS, x, t) / density(OLD, x, t)).log()
        (slope,) = torch.autograd.grad(log_rho.sum(), x)
        weight = density(OLD, GRID, t) * log_rho.detach().exp() ** alpha
        formula = -alpha * t / (1 - t) * (weight * slope**2).sum() / weight.sum()
        change = (exact_D(alpha, t + 1e-4) - exact_D(alpha, t - 1e-4)) / 2e-4
        assert change < 0
        assert abs(formula / change - 1) < 1e-5


def test_exact_divergence_grows_toward_data_and_its_gains_sum_to_the_total():
    levels = torch.linspace(1, 0, 26, dtype=torch.float64)
    D = torch.stack([torch.stack([exact_D(a, t) for t in levels]) for a in (0.5, 2.0, 4.0)])
    gain = renyi_gain(D)
    assert (gain > -1e-12).all() and D[:, 0].abs().max() < 1e-10
    torch.testing.assert_close(gain.sum(1), D[:, -1])
    assert (D[0] <= D[1] + 1e-12).all() and (D[1] <= D[2] + 1e-12).all()  # rises with alpha
    p, q = (torch.stack([density(mix, GRID, t) for t in levels]) for mix in (OLD, PLUS))
    kl = (q * (q / p).log()).sum(1) * STEP
    assert (D[1] >= kl - 1e-12).all() and (D[2] >= kl - 1e-12).all()  # alpha > 1 bounds KL
    assert (D[0] <= kl + 1e-12).all()  # alpha < 1 does not
    torch.testing.assert_close(monotone(D), D - D[:, :1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_total_gain_under_another_proposal_errs_by_at_most_2b(alpha):
    w, m, v = PLUS
    shared = (w, m + 0.03, v * 1.05)  # near pi_i+, so that delta < 1
    levels = torch.linspace(1, 0, 11, dtype=torch.float64)
    p, q, s = (torch.stack([density(mix, GRID, t) for t in levels]) for mix in (OLD, PLUS, shared))
    moment = (q / p) ** (alpha - 1)
    true, shifted = ((x * moment).sum(1).mul(STEP).log() / (alpha - 1) for x in (q, s))
    error = renyi_gain(shifted[None]).sum() - renyi_gain(true[None]).sum()
    measured_b = (shifted - true).abs().max()
    kl = (q[-1] * (q[-1] / s[-1]).log()).sum() * STEP
    delta = ((1 + FLOOR) / Z_OLD) ** (alpha - 1) * (kl / 2).sqrt()
    assert 0 < delta < 1
    assert 0 < abs(error) <= 2 * measured_b
    assert measured_b <= -torch.log(1 - delta) / (alpha - 1)


# --- the estimators


@pytest.mark.parametrize("alpha, K, tol", [(2.0, 1, 0.02), (4.0, 128, 0.03), (0.5, 128, 0.02)])
def test_positive_estimator_under_the_exact_pi_plus_reaches_quadrature(alpha, K, tol):
    levels = SEVEN[[0, 2, 3, 4, 6]]
    exact = torch.stack([exact_D(alpha, t) for t in levels])
    n = 100_000 if K == 1 else 8_000
    D = renyi_divergence(mixture_rewards(levels, 1, n, K, seed=0), alpha)[0]
    assert exact[-1] > 0.2
    assert (D - exact).abs().max() < tol


def test_one_rollout_is_unbiased_at_alpha_2():
    levels = SEVEN[[0, 3, 4, 6]]
    exact = torch.log1p(CV**2 * share_decided(levels))
    for K in (1, 4):
        R = gaussian_rewards(levels, 3000, 32, K, seed=1, positive=True)
        D, stderr = renyi_divergence(R)[0], bootstrap_stderr(R)[0][0]
        assert stderr.max() < 0.05 * exact[-1]
        assert ((D - exact).abs() <= 4 * stderr).all()


def test_jensen_bias_at_alpha_3_is_as_predicted():
    levels, share = SEVEN, share_decided(SEVEN)
    exact = torch.log1p(3 * CV**2 * share) / 2  # E_{pi_i+}[mu^2] = E[mu^3] = 1 + 3 CV^2 share
    for K in (1, 4):
        biased = torch.log1p(3 * CV**2 * share + CV**2 * (1 - share) / K) / 2
        biased = biased - biased[0]
        D = renyi_divergence(gaussian_rewards(levels, 1, 100_000, K, 2, positive=True), 3.0)[0]
        assert exact[-1] - biased[-1] > 0.08 * exact[-1]
        assert (D - biased).abs().max() < 0.03 * exact[-1]


@pytest.mark.parametrize("K", [1, 4])
def test_self_plug_in_is_flattened_by_the_predicted_amount(K):
    share = share_decided(SEVEN)
    exact = torch.log1p(CV**2 * share)
    flat = torch.log1p(CV**2 * (share + (1 - share) / K)) - math.log1p(CV**2 / K)
    D = renyi_divergence(gaussian_rewards(SEVEN, 1, 100_000, K, seed=3), 2.0, "self")[0]
    assert (D - flat).abs().max() < 0.03 * exact[-1]
    assert exact[-1] - D[-1] > 0.9 * math.log1p(CV**2 / K)  # at K = 1 nothing is left


@pytest.mark.parametrize("N, K", [(2, 1), (2, 3), (16, 1)])
def test_pair_is_unbiased_where_the_plug_in_is_flattened(N, K):
    exact = torch.log1p(CV**2 * share_decided(SEVEN))
    R = gaussian_rewards(SEVEN, 100_000 // N, N, K, seed=4, spread=0.3)
    D, stderr = renyi_divergence(R, 2.0, "pair")[0], bootstrap_stderr(R, 2.0, "pair")[0][0]
    assert stderr.max() < 0.04 * exact[-1]
    assert ((D - exact).abs() <= 4 * stderr).all()
    assert renyi_divergence(R, 2.0, "self")[0, -1] < 0.8 * exact[-1]


def test_pair_reaches_quadrature_from_the_policys_own_samples():
    levels = SEVEN[[0, 2, 3, 4, 6]]
    exact = torch.stack([exact_D(2.0, t) for t in levels])
    R = mixture_rewards(levels, 30_000, 4, 1, seed=5, source=OLD)
    assert (renyi_divergence(R, 2.0, "pair")[0] - exact).abs().max() < 0.02
    assert renyi_divergence(R, 2.0, "self")[0, -1] < 0.1 * exact[-1]


def test_pair_sees_nothing_in_a_reward_that_every_rollout_redraws():
    rng = torch.Generator().manual_seed(6)
    R = torch.rand(1, 4, 20_000, 4, 2, generator=rng) + 0.5  # variance 1/12, mean 1
    R[:, -1] = R[:, -1, ..., :1]  # fine detail, decided by nothing but the last step
    D = renyi_divergence(R, 2.0, "pair")[0]
    assert D[:-1].abs().max() < 0.002
    assert abs(D[-1] - math.log1p(1 / 12)) < 0.002
    plug_in = renyi_divergence(R, 2.0, "self")[0, -1]  # counts half of that noise as decided
    assert abs(plug_in - math.log1p(1 / 12) + math.log1p(1 / 24)) < 0.002


def ten_steps(sd, t_levels):
    """Slope, offset-free, and added variance of the sampler's steps on N(0, sd^2) data."""
    total = [(1 - t) ** 2 * sd**2 + t**2 for t in t_levels]
    out = []
    for t, s, vt, vs in zip(t_levels, t_levels[1:], total, total[1:], strict=False):
        scale = (1 - t) / (1 - s)  # the exact regression of x_s on x_t has slope scale vs / vt
        out.append((scale * vs / vt, s**2 * (1 - scale**2 * s**2 / t**2)))
    return out


def gaussian_velocity(x, t, sd):
    x0_hat = (1 - t) * sd**2 / ((1 - t) ** 2 * sd**2 + t**2) * x
    return (x - x0_hat) / t


@pytest.mark.parametrize("own_path", [True, False])
def test_pair_is_exact_for_a_ten_step_sampler_on_its_own_path(own_path):
    rng = torch.Generator().manual_seed(7)
    levels, sd, P, N = [1 - j / 10 for j in range(11)], 0.5, 20_000, 4
    steps = ten_steps(sd, levels)
    variance, to_data = [1.0], [1.0]
    for slope, added in steps:
        variance.append(slope**2 * variance[-1] + added)
    for slope, _ in reversed(steps):
        to_data.insert(0, slope * to_data[0])

    def noise():
        return torch.randn(P, N, generator=rng, dtype=torch.float64)

    def roll(x, j):
        for t, s in zip(levels[j:], levels[j + 1 :], strict=False):
            x = ancestral_step(x, gaussian_velocity(x, t, sd), t, s, noise())
        return x

    path = [noise()]
    for t, s in zip(levels, levels[1:], strict=False):
        path.append(ancestral_step(path[-1], gaussian_velocity(path[-1], t, sd), t, s, noise()))
    states = path if own_path else [noised(path[-1], t, noise()) for t in levels]
    R = torch.stack([1 + CV * roll(x, j) for j, x in enumerate(states)])[None, ..., None]
    D = renyi_divergence(R.clamp(min=0), 2.0, "pair")[0]
    own = torch.tensor([a**2 * v for a, v in zip(to_data, variance, strict=True)])
    again = torch.tensor([a * (1 - t) for a, t in zip(to_data, levels, strict=True)]) * variance[-1]
    assert (D - torch.log1p(CV**2 * (own if own_path else again))).abs().max() < 2e-4
    assert abs(own[7] / variance[-1] - 0.763) < 1e-3 and abs(again[7] / variance[-1] - 0.576) < 1e-3


def test_each_levels_own_mean_cancels_the_noise_of_the_mean():
    runs = [gaussian_rewards(SEVEN[[0, 3, 6]], 16, 16, 4, seed) for seed in range(60)]
    raw = torch.stack([(R.mean(-1) ** 2).mean((2, 3)).log()[0].diff() for R in runs])
    for estimator in ("self", "pair"):
        gain = torch.stack([renyi_gain(renyi_divergence(R, 2.0, estimator))[0] for R in runs])
        assert (raw.std(0) > 2.5 * gain.std(0)).all()


@pytest.mark.parametrize("estimator, alpha", [("positive", 4.0), ("self", 0.5), ("pair", 2.0)])
@pytest.mark.parametrize("pool", ["all", "prompt"])
def test_divergence_ignores_the_scale_of_a_reward_and_the_order_of_everything(
    estimator, alpha, pool
):
    R = mixture_rewards(SEVEN, 6, 40, 3, seed=8, source=OLD)
    R = torch.cat([R, R.flip(2) ** 2 + 1])
    D = renyi_divergence(R, alpha, estimator, pool)
    assert D.shape == (2, 7) and D.dtype == torch.float64 and (D[:, 0] == 0).all()
    scaled = R * torch.tensor([100.0, 1e-3])[:, None, None, None, None]
    torch.testing.assert_close(renyi_divergence(scaled, alpha, estimator, pool), D)
    shuffled = R.flip(0)[:, :, torch.tensor([3, 1, 5, 0, 2, 4])].flip(3, 4)
    torch.testing.assert_close(renyi_divergence(shuffled, alpha, estimator, pool).flip(0), D)


@pytest.mark.parametrize("estimator, alpha", [("self", 2.0), ("self", 4.0), ("pair", 2.0)])
def test_one_log_per_prompt_cancels_each_prompts_own_z(estimator, alpha):
    R = gaussian_rewards(SEVEN, 40, 2000, 2, seed=9)
    factor = torch.logspace(-3, 3, 40, dtype=torch.float64)[:, None, None]
    for pool in ("all", "prompt"):
        D = renyi_divergence(R, alpha, estimator, pool)
        changed = (renyi_divergence(R * factor, alpha, estimator, pool) - D).abs().max()
        assert changed < 1e-9 if pool == "prompt" else changed > 1e-4
        torch.testing.assert_close(  # prompts of equal Z: the pools agree
            D, renyi_divergence(R, alpha, estimator, "all"), rtol=0, atol=0.02 * D[0, -1].item()
        )


def test_prompts_weigh_by_hand_computed_powers_of_z():
    R = torch.ones(1, 2, 2, 16, 1)
    R[0, 0, 1], R[0, 1, 0], R[0, 1, 1] = 3.0, 2.0, 3.0  # means 1 -> 2 and 3 -> 3
    assert abs(renyi_divergence(R)[0, 1] - math.log(5 / 4)) < 1e-12
    assert abs(renyi_divergence(R, 3.0)[0, 1] - math.log(13 / 10) / 2) < 1e-12
    assert abs(renyi_divergence(R, pool="prompt")[0, 1] - math.log(2) / 2) < 1e-12
    # self, alpha 2, all: log E[mu^2] - 2 log E[mu]
    expected = math.log(6.5 / 2.5**2) - math.log(5 / 2**2)
    assert abs(renyi_divergence(R, 2.0, "self")[0, 1] - expected) < 1e-12


def test_zero_mu_counts_as_zero_above_alpha_1_and_in_self_below_it():
    R = torch.tensor([[1.0, 1.0], [0.0, 3.0]]).reshape(1, 2, 1, 2, 1)
    assert abs(renyi_divergence(R, 3.0)[0, 1] - math.log(4.5) / 2) < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a prompt of zeros is not dropped from the pooled moment
        half = torch.cat([R, 0 * R], 2)
        assert abs(renyi_divergence(half)[0, 1] - math.log(1.5)) < 1e-12
    below = (math.log(3**0.5 / 2) - 0.5 * math.log(1.5)) / -0.5
    assert abs(renyi_divergence(R, 0.5, "self")[0, 1] - below) < 1e-12


def test_one_log_per_prompt_is_biased_upward_by_few_samples():
    levels = SEVEN[[0, 3, 6]]
    exact = exact_D(2.0, 0.0)
    bias = {}
    for N, P in ((16, 12_000), (256, 750)):
        R = mixture_rewards(levels, P, N, 1, seed=10)
        bias[N] = renyi_divergence(R, pool="prompt")[0, -1] - exact
    stderr = bootstrap_stderr(mixture_rewards(levels, 12_000, 16, 1, 10), pool="prompt")[0][0, -1]
    assert bias[16] > 4 * stderr and bias[16] > 4 * abs(bias[256])
    with pytest.raises(ValueError, match="16"):
        renyi_divergence(torch.ones(1, 3, 5, 15, 2), pool="prompt")


@pytest.mark.parametrize("estimator", ["positive", "self", "pair"])
def test_dropped_prompts_are_counted_aloud_for_their_reward_only(estimator):
    R = gaussian_rewards(SEVEN, 10, 200, 2, seed=11).repeat(2, 1, 1, 1, 1)
    R[1, 2, :3] = 0  # three prompts of reward 1 without a moment at level 2
    if estimator == "pair":
        R[1, :, :3] = 0
    with pytest.warns(UserWarning) as record:
        D = renyi_divergence(R, 2.0, estimator, "prompt")
    assert [str(w.message) for w in record] == ["reward row 1: 3 of 10 prompts dropped"]
    kept = renyi_divergence(R[:1, :, 3:], 2.0, estimator, "prompt")
    torch.testing.assert_close(D[1:], kept)
    R[1] = 0
    with pytest.raises(ValueError, match="reward row 1"):
        renyi_divergence(R, 2.0, estimator, "prompt")


def test_negative_covariance_gives_an_answer_or_a_named_error_never_nan():
    R = torch.ones(2, 2, 1, 2, 1)
    R[1, :, 0, :, 0] = torch.tensor([[1.5, 0.5], [0.5, 1.5]])  # clean .5, 1.5, rollouts opposed
    D = renyi_divergence(R, 2.0, "pair")  # cov -.25, Z^2 1; clean: cov .5, Z^2 .75
    assert abs(D[1, 1] - math.log1p(0.5 / 0.75) + math.log1p(-0.25)) < 1e-12
    R[1, :, 0, :, 0] = torch.tensor([[2.0, 0.0], [0.0, 2.0]])  # cov -1, Z^2 1
    with pytest.raises(ValueError, match="reward row 1"):
        renyi_divergence(R, 2.0, "pair")


def spoiled(value, row=1):
    R = torch.rand(3, 4, 2, 16, 2, generator=torch.Generator().manual_seed(0)) + 0.1
    R[:, -1] = R[:, -1, ..., :1]
    R[row, 1, 1, 3, 1] = value
    return R


GOOD = spoiled(0.5)
ZERO_ROW = GOOD * torch.tensor([1.0, 1.0, 0.0])[:, None, None, None, None]
ZERO_MU = GOOD.clone()
ZERO_MU[1, 2, 0, 5] = 0
BAD_CALLS = [
    (GOOD, dict(alpha=1.0), "alpha"),
    (GOOD, dict(alpha=0.0), "alpha"),
    (GOOD, dict(alpha=-2.0), "alpha"),
    (GOOD, dict(alpha=math.nan), "alpha"),
    (GOOD, dict(alpha=math.inf), "alpha"),
    (GOOD, dict(estimator="both"), "both"),
    (GOOD, dict(pool="mean"), "mean"),
    (GOOD, dict(alpha=3.0, estimator="pair"), "alpha = 2"),
    (GOOD[:, :, :, :1], dict(estimator="pair"), "N >= 2"),
    (GOOD[..., 0], dict(), "shape"),
    (GOOD[:, :1], dict(), "shape"),
    (GOOD[:, :, :0], dict(), "shape"),
    (GOOD[:, :, :, :15], dict(pool="prompt"), "16"),
    (spoiled(-0.1), dict(), "reward row 1"),
    (spoiled(math.nan, 2), dict(), "reward row 2"),
    (spoiled(math.inf, 0), dict(), "reward row 0"),
    (ZERO_ROW, dict(), "reward row 2"),
    (ZERO_ROW, dict(estimator="self"), "reward row 2"),
    (ZERO_ROW, dict(estimator="pair"), "reward row 2"),
    (ZERO_MU, dict(alpha=0.5), "reward row 1"),
    (GOOD.flip(1), dict(), "reward row 0 .* order"),
]


@pytest.mark.parametrize("R, kwargs, words", BAD_CALLS)
def test_calls_that_make_no_sense_are_value_errors_with_the_reason(R, kwargs, words):
    renyi_divergence(GOOD)
    with pytest.raises(ValueError, match=words):
        renyi_divergence(R, **kwargs)
    if R is not ZERO_ROW:
        with pytest.raises(ValueError, match=words):
            bootstrap_stderr(R, **kwargs)


# --- error bars and the projection


@pytest.mark.parametrize("pool", ["all", "prompt"])
@pytest.mark.parametrize("estimator", ["positive", "self", "pair"])
def test_bootstrap_equals_recomputing_everything_on_each_redraw(estimator, pool):
    R = mixture_rewards(SEVEN, 12, 32, 2, seed=12, source=OLD)
    R = torch.cat([R, R.sqrt()])
    drawn = torch.randint(12, (30, 12), generator=torch.Generator().manual_seed(3))
    D = torch.stack([renyi_divergence(R[:, :, i], 2.0, estimator, pool) for i in drawn])
    stderr_D, stderr_gain = bootstrap_stderr(R, 2.0, estimator, pool, n_boot=30, seed=3)
    torch.testing.assert_close(stderr_D, D.std(0))
    torch.testing.assert_close(stderr_gain, D.diff(dim=-1).std(0))


BOTH = [("positive", "all"), ("self", "prompt"), ("pair", "all")]


@pytest.mark.parametrize("estimator, pool", BOTH)
def test_bootstrap_stderr_agrees_with_the_spread_over_replications(estimator, pool):
    runs = []
    for seed in range(400):
        R = gaussian_rewards(SEVEN[[0, 3, 4, 6]], 64, 16, 2, seed, estimator == "positive", 0.2)
        gain = renyi_gain(renyi_divergence(R, 2.0, estimator, pool))
        runs.append((gain, *(bootstrap_stderr(R, 2.0, estimator, pool) if seed < 40 else ())))
    spread = torch.stack([run[0] for run in runs]).std(0)
    stderr = torch.stack([run[2] for run in runs[:40]]).mean(0)
    assert (stderr / spread - 1).abs().max() < 0.25


def test_bootstrap_of_one_prompt_is_nan_and_a_lost_moment_is_nan_aloud():
    R = gaussian_rewards(SEVEN, 1, 32, 2, seed=13)
    assert all(x.isnan().all() for x in bootstrap_stderr(R))
    R = gaussian_rewards(SEVEN, 4, 32, 2, seed=13).repeat(2, 1, 1, 1, 1)
    R[1, :, 1:] = 0  # reward 1 lives in one prompt: some redraws miss it
    with pytest.warns(UserWarning, match="reward row 1"):
        stderr_D, stderr_gain = bootstrap_stderr(R)
    assert stderr_D[1].isnan().all() and stderr_gain[1].isnan().all()
    assert stderr_D[0].isfinite().all() and (stderr_gain[0] > 0).all()


def test_monotone_is_isotonic_regression():
    rng = torch.Generator().manual_seed(14)
    D = torch.linspace(0, 1, 26, dtype=torch.float64) + torch.randn(
        8, 26, generator=rng, dtype=torch.float64
    )
    fit = torch.tensor([isotonic_regression(row).x.tolist() for row in D.numpy()])
    torch.testing.assert_close(monotone(D), (fit - fit[:, :1]).double(), rtol=0, atol=1e-6)
    assert (renyi_gain(monotone(D)) >= 0).all() and (monotone(D)[:, 0] == 0).all()
    torch.testing.assert_close(monotone(monotone(D)), monotone(D))
    falling = monotone(torch.tensor([[3.0, 2.0, 1.0], [0.0, 2.0, 1.0], [0.0, 1.0, math.nan]]))
    torch.testing.assert_close(falling[:2], torch.tensor([[0.0, 0, 0], [0, 1.5, 1.5]]).double())


# --- phases 1 and 2: noising and the ancestral step


def step_coefficients(t, s):
    """Weights of x_t, x0_hat and noise in one step, read off unit inputs."""
    x, v, noise = (torch.zeros(3, dtype=torch.float64) for _ in range(3))
    x[0], noise[2] = 1.0, 1.0
    v[0], v[1] = 1 / t, -1 / t  # x0_hat = x - t v = 0, 1, 0
    return ancestral_step(x, v, t, s, noise).tolist()


@pytest.mark.parametrize("t, s", [(1.0, 0.8), (0.7, 0.3), (0.31, 0.3), (0.05, 0.001)])
def test_ancestral_bridge_keeps_the_noising_law_of_the_true_x0(t, s):
    on_xt, on_x0, on_noise = step_coefficients(t, s)
    # x_t = (1-t) x0 + t n, so x_s must be (1-s) x0 + s n' with the covariance of the noising path
    assert abs(on_xt * (1 - t) + on_x0 - (1 - s)) < 1e-12
    assert abs(on_xt**2 * t**2 + on_noise**2 - s**2) < 1e-12
    assert abs(on_xt * t**2 - (1 - t) / (1 - s) * s**2) < 1e-12
    u = (t + s) / 2  # two bridges in a row are one bridge
    first, second = step_coefficients(t, u), step_coefficients(u, s)
    assert abs(second[0] * first[0] - on_xt) < 1e-12
    assert abs(second[0] * first[1] + second[1] - on_x0) < 1e-12
    assert abs(math.hypot(second[0] * first[2], second[2]) - on_noise) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_last_ancestral_step_is_x0_hat_and_the_first_has_no_singularity(dtype):
    rng = torch.Generator().manual_seed(15)
    x, v, noise = (torch.randn(4, 3, 8, 8, generator=rng).to(dtype) for _ in range(3))
    for t in (1.0, 0.5, 0.001):
        last = ancestral_step(x, v, t, 0.0, noise)
        wide = torch.promote_types(dtype, torch.float32)
        x0_hat = x - torch.tensor(t, dtype=wide).reshape(1, 1, 1, 1) * v
        assert last.dtype == dtype and torch.equal(last, x0_hat.to(dtype))
    first = ancestral_step(x, v, 1.0, 0.9, noise)
    expected = 0.1 * (x - v).double() + 0.9 * noise.double()
    tol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=tol)
    assert noised(x, 0.3, noise).dtype == dtype and torch.equal(noised(x, 0.0, noise), x)
    assert torch.equal(noised(x, 1, noise), noise)


def test_one_level_per_sample_equals_one_call_per_sample():
    rng = torch.Generator().manual_seed(16)
    x, v, noise = (torch.randn(3, 4, 5, generator=rng) for _ in range(3))
    t, s = torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.9, 0.0, 0.1])
    step, mixed = ancestral_step(x, v, t, s, noise), noised(x, t, noise)
    for b in range(3):
        one = slice(b, b + 1)
        for level_t, level_s in ((t[b], s[b]), (t[b].item(), s[b].item())):
            assert torch.equal(
                ancestral_step(x[one], v[one], level_t, level_s, noise[one]), step[one]
            )
            assert torch.equal(noised(x[one], level_t, noise[one]), mixed[one])
    for bad in ((0.5, 0.5), (0.4, 0.5), (750, 0.5), (math.nan, 0.1), (0.5, -0.1), (t[:2], 0)):
        with pytest.raises(ValueError):
            ancestral_step(x, v, *bad, noise)
    with pytest.raises(ValueError):
        noised(x, 750, noise)


def test_ten_ancestral_steps_lose_the_variance_that_their_recursion_predicts():
    rng = torch.Generator().manual_seed(17)
    levels, sd = [1 - j / 10 for j in range(11)], 0.5
    x, variance = torch.randn(200_000, generator=rng, dtype=torch.float64), 1.0
    for (t, s), (slope, added) in zip(
        zip(levels, levels[1:], strict=False), ten_steps(sd, levels), strict=True
    ):
        noise = torch.randn(len(x), generator=rng, dtype=torch.float64)
        x, variance = (
            ancestral_step(x, gaussian_velocity(x, t, sd), t, s, noise),
            (slope**2 * variance + added),
        )
        assert abs(x.var() / variance - 1) < 0.015
    assert abs(variance / sd**2 - 0.597) < 0.001


@pytest.mark.parametrize("start", [0.9, 0.5])
def test_ancestral_sampler_reaches_the_exact_posterior_as_steps_shrink(start):
    sd, xt, error = 0.5, 0.8, []
    posterior = sd**2 * start**2 / ((1 - start) ** 2 * sd**2 + start**2)
    mean = (1 - start) * posterior / start**2 * xt
    for T in (10, 400):
        rng = torch.Generator().manual_seed(18)
        levels = [start * (1 - j / T) for j in range(T)] + [0.0]
        x = torch.full((20_000,), xt, dtype=torch.float64)
        for t, s in zip(levels, levels[1:], strict=False):
            noise = torch.randn(len(x), generator=rng, dtype=torch.float64)
            x = ancestral_step(x, gaussian_velocity(x, t, sd), t, s, noise)
        assert abs(x.mean() - mean) < 4 * math.sqrt(posterior / len(x))
        error.append(abs(x.var() / posterior - 1))
    assert error[0] > 0.1 and error[1] < 0.03


def test_estimates_of_good_input_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in ("positive", "self", "pair"):
            for pool in ("all", "prompt"):
                renyi_divergence(GOOD, 2.0, estimator, pool)
                bootstrap_stderr(GOOD, 2.0, estimator, pool)


# ---------------------------------------------------------------- sinkhorn.py


def random_curves(m, T, seed, spread=1.0):
    """Positive curves (m, T) with peaks, and unequal budgets (m,)."""
    generator = torch.Generator().manual_seed(seed)
    gain = (spread * torch.randn(m, T, generator=generator, dtype=torch.float64)).exp()
    return gain, torch.rand(m, generator=generator, dtype=torch.float64) + 0.3


def shapes_of(gain):
    return (gain / gain.mean(1, keepdim=True)).numpy()


def marginal_matrix(m, T):
    """Row sums, then column sums, of a flattened (m, T) matrix."""
    rows = np.kron(np.eye(m), np.ones(T))
    return np.concatenate([rows, np.kron(np.ones(m), np.eye(T))])


def transport_plan(ghat, lam, T):
    """The linear programme max <W, ghat> under both marginals, by scipy."""
    m = len(lam)
    b = np.concatenate([lam / lam.sum(), np.full(T, 1 / T)])
    return linprog(-ghat.ravel(), A_eq=marginal_matrix(m, T), b_eq=b).x.reshape(m, T)


def no_warning(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_sinkhorn_equals_a_direct_minimiser_of_the_kl(tau):
    gain, lam = random_curves(3, 5, seed=1)
    K = np.exp(shapes_of(gain) / tau).ravel()
    b = np.concatenate([lam / lam.sum(), np.full(5, 0.2)])
    found = minimize(
        lambda w: np.sum(w * np.log(w / K) - w + K),
        np.full(15, 1 / 15),
        jac=lambda w: np.log(w / K),
        bounds=[(1e-12, 1)] * 15,
        # the last column sum follows from the others
        constraints={"type": "eq", "fun": lambda w: (marginal_matrix(3, 5) @ w - b)[:-1]},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    W, residual = no_warning(sk.sinkhorn, gain, lam, tau=tau)
    assert W.dtype == torch.float64 and residual <= 1e-9
    assert np.abs(W.numpy().ravel() - found.x).max() < 1e-6


@pytest.mark.parametrize(("m", "T", "tau"), [(4, 10, 1.0), (4, 25, 0.3), (2, 3, 0.1), (1, 7, 1.0)])
def test_sinkhorn_agrees_with_pot_in_the_log_domain(m, T, tau):
    gain, lam = random_curves(m, T, seed=m * T)
    a, b = (lam / lam.sum()).numpy(), np.full(T, 1 / T)
    cost = -shapes_of(gain)
    plan = ot.sinkhorn(a, b, cost, tau, method="sinkhorn_log", numItermax=20_000, stopThr=1e-12)
    W, _ = no_warning(sk.sinkhorn, gain, lam, tau=tau, tol=1e-12)
    assert np.abs(W.numpy() - plan).max() < 1e-9


def test_small_tau_reaches_the_transport_solution():
    gain, lam = random_curves(3, 7, seed=0, spread=0.5)
    plan = transport_plan(shapes_of(gain), lam.numpy(), 7)
    generator = np.random.default_rng(0)
    for _ in range(5):  # the optimum is unique: small changes of the gains do not move it
        moved = shapes_of(gain) + 1e-4 * generator.standard_normal((3, 7))
        assert np.abs(transport_plan(moved, lam.numpy(), 7) - plan).max() < 1e-9
    distances = [
        np.abs(sk.sinkhorn(gain, lam, tau, max_iter=20_000)[0].numpy() - plan).max()
        for tau in (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
    ]
    assert all(b < a for a, b in zip(distances, distances[1:], strict=False))
    assert distances[0] > 0.05 and distances[-1] < 1e-6


def test_small_tau_gives_each_step_to_the_best_priced_reward_where_argmax_breaks_the_budget():
    # Reward 0 has the larger shape at steps 0, 1 and 2, but its budget pays for 1.5 of four steps.
    # Moving weight to reward 1 costs .5 at step 2 and .8 at step 1: so 2 goes, and half of step 1.
    gain = [[1.6, 1.2, 1.0, 0.2], [0.4, 0.4, 0.5, 2.7]]
    W, _ = sk.sinkhorn(gain, [1.5, 2.5], tau=0.01)
    right = torch.tensor([[1, 0.5, 0, 0], [0, 0.5, 1, 1]], dtype=torch.float64) / 4
    assert (W - right).abs().max() < 1e-8
    assert (torch.tensor(gain).argmax(0) == torch.tensor([0, 0, 0, 1])).all()


@pytest.mark.parametrize("flat", [[[1, 1, 1]] * 2, [[7, 7, 7], [0.01, 0.01, 0.01]]])
def test_flat_is_static(flat):
    W, residual = no_warning(sk.sinkhorn, flat, [2, 1])
    assert (W - sk.static_weights([2, 1], 3)).abs().max() < 1e-15 and residual < 1e-15
    assert (no_warning(sk.row_weights, flat, [2, 1]) - W).abs().max() < 1e-15


def test_static_weights_are_the_budgets_over_t():
    right = torch.tensor([[0.125] * 4, [0.0625] * 4, [0.0625] * 4], dtype=torch.float64)
    assert torch.equal(sk.static_weights([2, 1, 1], 4), right)


def test_high_tau_is_static():
    gain, lam = random_curves(4, 10, seed=3)
    static = sk.static_weights(lam, 10)
    near, _ = sk.sinkhorn(gain, lam, tau=1e6)
    assert 1e-9 < (near - static).abs().max() < 1e-6
    assert (sk.sinkhorn(gain, lam, tau=math.inf)[0] - static).abs().max() < 1e-15
    assert (sk.row_weights(gain, lam, tau=math.inf) - static).abs().max() < 1e-15


def test_permuting_rewards_and_steps_permutes_the_weights():
    gain, lam = random_curves(4, 9, seed=4)
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randperm(4, generator=generator), torch.randperm(9, generator=generator)
    W, _ = sk.sinkhorn(gain, lam, tol=1e-13)
    assert (sk.sinkhorn(gain[p][:, q], lam[p], tol=1e-13)[0] - W[p][:, q]).abs().max() < 1e-12
    rows = sk.row_weights(gain, lam)
    assert (sk.row_weights(gain[p][:, q], lam[p]) - rows[p][:, q]).abs().max() < 1e-15


def test_scaling_the_gains_of_one_reward_changes_nothing():
    gain, lam = random_curves(3, 6, seed=5)
    scale = torch.tensor([[1e-150], [1.0], [1e200]], dtype=torch.float64)
    for weights in (lambda *a: sk.sinkhorn(*a)[0], sk.row_weights):
        assert (weights(gain * scale, lam * 1e150) - weights(gain, lam)).abs().max() < 1e-14


def test_a_constant_added_to_a_column_of_the_kernel_changes_nothing():
    # Every reward gains more at step 2: no reason to prefer one reward there.
    gain = torch.ones(3, 5, dtype=torch.float64)
    gain[:, 2] = 6.0
    assert (sk.sinkhorn(gain, [1, 2, 3])[0] - sk.static_weights([1, 2, 3], 5)).abs().max() < 1e-15


def test_the_reward_that_gains_early_is_weighted_early():
    gain = [[5, 3, 1, 0], [1, 1, 1, 1], [0, 1, 3, 5]]
    W, _ = sk.sinkhorn(gain, [1, 1, 1])
    assert W[0, 0] > W[1, 0] > W[2, 0] and W[0, 3] < W[1, 3] < W[2, 3]
    assert (W.sum(1) - 1 / 3).abs().max() < 1e-9 and (W.sum(0) - 1 / 4).abs().max() < 1e-15


def test_a_zero_budget_is_a_row_of_exact_zeros_and_the_others_do_not_see_it():
    gain, lam = random_curves(4, 8, seed=6)
    lam[1] = 0
    keep = [0, 2, 3]
    W, residual = no_warning(sk.sinkhorn, gain, lam)
    assert torch.equal(W[1], torch.zeros(8, dtype=torch.float64)) and residual <= 1e-9
    assert (W[keep] - sk.sinkhorn(gain[keep], lam[keep])[0]).abs().max() < 1e-15
    rows = sk.row_weights(gain, lam)
    assert (rows[1] == 0).all() and (sk.static_weights(lam, 8)[1] == 0).all()


def test_a_reward_without_a_curve_follows_the_shared_column_scaling():
    gain, lam = random_curves(3, 8, seed=7)
    gain[1] = math.nan
    W, _ = no_warning(sk.sinkhorn, gain, lam, tol=1e-13)
    # W_ij = e^f_i K_ij e^g_j: the scaling e^g, seen through the other rows, divided by their kernel
    K = torch.from_numpy(np.exp(shapes_of(gain)))
    for other in (0, 2):
        ratio = W[1] / (W[other] / K[other])
        assert (ratio / ratio[0] - 1).abs().max() < 1e-12
    assert W[1].std() > 1e-3  # not simply uniform
    # A constant curve says the same thing, and so do two rewards without a curve.
    assert (sk.sinkhorn(gain.nan_to_num(nan=3.0), lam, tol=1e-13)[0] - W).abs().max() < 1e-14
    uniform = sk.row_weights(gain, lam)[1]
    assert (uniform - lam[1] / lam.sum() / 8).abs().max() < 1e-15


def test_all_rewards_without_a_curve_is_static():
    W, _ = no_warning(sk.sinkhorn, torch.full((2, 4), math.nan), [3, 1])
    assert (W - sk.static_weights([3, 1], 4)).abs().max() < 1e-15


@pytest.mark.parametrize(
    "row", [[0, 0, 0, 0], [-1, 0.5, 0.2, 0], [0.1, 0.4, 0.1, -0.6], [-2, -2, -2, -2]]
)
def test_a_curve_without_a_positive_total_is_flat_and_says_so(row):
    gain = [[3.0, 1, 1, 1], row]  # the third sums to 2e-16 in floating point
    with pytest.warns(UserWarning, match="row 1 has no positive total"):
        W, _ = sk.sinkhorn(gain, [1, 1])
    assert (W - sk.sinkhorn([[3, 1, 1, 1], [1, 1, 1, 1]], [1, 1])[0]).abs().max() < 1e-14
    with pytest.warns(UserWarning, match="row 1"):
        sk.row_weights(gain, [1, 1])


def test_single_negative_gains_are_legal():
    W, residual = no_warning(sk.sinkhorn, [[3, -0.5, 0.5], [1, 1, 1]], [1, 1])
    assert residual <= 1e-9 and W[0, 1] < W[0, 2] < W[0, 0] and (W > 0).all()


def test_one_reward_is_uniform_and_one_step_is_the_budgets():
    for gain in ([[9, 1, 0, 4]], [[math.nan] * 4]):
        W, residual = no_warning(sk.sinkhorn, gain, [5])
        assert (W - 0.25).abs().max() < 1e-15 and residual < 1e-15
    W, residual = no_warning(sk.sinkhorn, [[2], [0.1], [math.nan]], [2, 1, 1])
    assert (W[:, 0] - torch.tensor([0.5, 0.25, 0.25])).abs().max() < 1e-15 and residual < 1e-15


def test_nothing_underflows_at_a_small_temperature():
    gain, lam = random_curves(4, 25, seed=8, spread=0.5)
    W, residual = sk.sinkhorn(gain, lam, tau=0.01)
    assert W.isfinite().all() and residual < 1e-4
    assert (W.sum(0) - 1 / 25).abs().max() < 1e-12  # columns are exact even before convergence
    assert sk.row_weights(gain, lam, tau=1e-4).isfinite().all()


def test_a_hundred_sweeps_are_enough_at_the_papers_sizes():
    for seed in range(20):
        gain, lam = random_curves(2 + seed % 3, (10, 25)[seed % 2], seed)
        _, residual = no_warning(sk.sinkhorn, gain, lam, max_iter=100)
        assert residual <= 1e-9


def test_stopping_early_warns_and_the_residual_is_the_worst_of_both_marginals():
    gain, lam = random_curves(4, 10, seed=9)
    with pytest.warns(UserWarning, match="max_iter"):
        W, residual = sk.sinkhorn(gain, lam, max_iter=1)
    rows, columns = (W.sum(1) - lam / lam.sum()).abs().max(), (W.sum(0) - 0.1).abs().max()
    assert residual == max(rows, columns).item() > 1e-4 and columns < 1e-15


def test_row_weights_keep_budgets_and_leave_columns_free():
    gain, lam = random_curves(3, 6, seed=10)
    W = sk.row_weights(gain, lam, tau=0.5)
    K = torch.from_numpy(np.exp(shapes_of(gain) / 0.5))
    assert (W - (lam / lam.sum())[:, None] * K / K.sum(1, keepdim=True)).abs().max() < 1e-15
    assert (W.sum(1) - lam / lam.sum()).abs().max() < 1e-15 and W.sum(0).std() > 0.01


def test_lists_tensors_and_single_precision_are_accepted_and_left_alone():
    gain, lam = torch.tensor([[3.0, 1, 2], [1, 1, 4]], requires_grad=True), torch.tensor([1, 2])
    before = gain.detach().clone()
    W, _ = sk.sinkhorn(gain, lam)
    assert torch.equal(gain.detach(), before) and not W.requires_grad
    assert torch.equal(W, sk.sinkhorn(before.tolist(), [1, 2])[0])
    assert torch.equal(W, sk.sinkhorn(before.numpy(), np.array([1, 2]))[0])
    # .1 means the float64 number, also in a list
    assert sk.static_weights([0.1, 0.3], 1)[0, 0].item() == pytest.approx(1 / 4, abs=1e-15)
    assert torch.equal(sk.static_weights([1e308, 1e308], 1), sk.static_weights([1, 1], 1))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("gain", "lam", "options", "message"),
    [
        ([[1, 2], [2, 1]], [1, -1], {}, "^lam: .*>= 0"),
        ([[1, 2], [2, 1]], [1, NAN], {}, "^lam: .*finite"),
        ([[1, 2], [2, 1]], [1, INF], {}, "^lam: .*finite"),
        ([[1, 2], [2, 1]], [0, 0], {}, "^lam: .*not all zero"),
        ([[1, 2], [2, 1]], [1, 1, 1], {}, "^lam: expected 2 budgets.*got 3"),
        ([[1, 2], [2, 1]], [[1, 1]], {}, r"^lam: expected shape \(m,\)"),
        ([[1, 2], [2, 1]], 1, {}, "^lam: expected shape"),
        ([[1, 2], [2, 1]], ["a", "b"], {}, "^lam: expected numbers"),
        ([[1, 2], [NAN, 1]], [1, 1], {}, "^gain: row 1 .*all NaN"),
        ([[1, INF], [2, 1]], [1, 1], {}, "^gain: row 0 .*finite"),
        ([[INF, INF], [2, 1]], [1, 1], {}, "^gain: row 0"),
        ([[1, 2], [2, 1, 3]], [1, 1], {}, "^gain: expected numbers"),
        ([1, 2], [1, 1], {}, r"^gain: expected shape \(m, T\)"),
        ([[], []], [1, 1], {}, "^gain: expected shape"),
        ([[1, 2], [2, 1]], [1, 1], {"tau": 0}, "^tau: .*> 0"),
        ([[1, 2], [2, 1]], [1, 1], {"tau": -1.0}, "^tau: .*> 0"),
        ([[1, 2], [2, 1]], [1, 1], {"tau": NAN}, "^tau: .*> 0"),
        ([[1, 2], [2, 1]], [1, 1], {"tau": 1e-320}, "^tau: .*too small"),
        ([[1, 2], [2, 1]], [1, 1], {"tol": 0}, "^tol"),
        ([[1, 2], [2, 1]], [1, 1], {"tol": NAN}, "^tol"),
        ([[1, 2], [2, 1]], [1, 1], {"max_iter": 0}, "max_iter"),
    ],
)
def test_sinkhorn_says_which_argument_is_wrong_and_what_is_right(gain, lam, options, message):
    with pytest.raises(ValueError, match=message):
        sk.sinkhorn(gain, lam, **options)
    if not {"tol", "max_iter"} & set(options):
        with pytest.raises(ValueError, match=message):
            sk.row_weights(gain, lam, **options)


def test_static_weights_need_a_step_and_a_budget():
    for lam, T, message in (
        ([1, 1], 0, "^T: "),
        ([1, 1], 2.5, "^T: "),
        ([0, 0], 3, "^lam: "),
        ([], 3, "^lam: "),
    ):
        with pytest.raises(ValueError, match=message):
            sk.static_weights(lam, T)


def write_curve(path, names="ocr,clipscore,detail", drop=(), **change):
    gain, _ = random_curves(3, 6, seed=11)
    D = torch.cat([torch.zeros(3, 1, dtype=torch.float64), gain.cumsum(1)], dim=1)
    sigmas = torch.tensor([1, 0.9375, 0.8571, 0.75, 0.6, 0.375, 0])
    tensors = {"gain": gain, "stderr": 0.1 * gain, "D": D, "sigmas": sigmas} | change
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    save_file(tensors, path, metadata={"rewards": names})
    return gain


def test_command_line_prints_the_weights_and_their_marginals(tmp_path, capsys):
    gain = write_curve(tmp_path / "c.safetensors")
    sk.main([str(tmp_path / "c.safetensors"), "--lam", "2,1,1", "--tau", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    W, _ = sk.sinkhorn(gain, [2, 1, 1], tau=0.5)
    assert "1/(mT)" in lines[0] and "tau 0.5" in lines[0]
    assert lines[1].split()[:5] == ["step", "sigma", "ocr", "clipscore", "detail"]
    table = np.array([[float(cell) for cell in line.split()] for line in lines[2:8]])
    assert np.abs(table[:, 0] - np.arange(6)).max() == 0 and table[0, 1] == 1
    assert np.abs(table[:, 2:5] - 18 * W.T.numpy()).max() < 6e-4
    assert np.abs(table[:, 5] - 1).max() < 1e-6
    assert lines[8].split()[2:] == ["0.500000", "0.250000", "0.250000"]
    spread = f"{18 * W.min():.2f} to {18 * W.max():.2f}"
    assert lines[9].startswith("residual ") and spread in lines[9]


def test_command_line_plot_is_a_small_png_and_leaves_nothing_else(tmp_path, capsys):
    write_curve(tmp_path / "c.safetensors")
    plot = tmp_path / "W.png"
    plot.write_bytes(b"old")
    sk.main([str(tmp_path / "c.safetensors"), "--lam", "2,0,1", "--plot", str(plot)])
    data = plot.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) < 200_000
    assert {p.name for p in tmp_path.iterdir()} == {"c.safetensors", "W.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.safetensors", "--lam", "1,1,1"], "no.safetensors"),
        (["text.safetensors", "--lam", "1,1,1"], "text.safetensors: expected a curve"),
        (["cut.safetensors", "--lam", "1,1,1"], "cut.safetensors: expected a curve"),
        (["empty.safetensors", "--lam", "1,1,1"], "empty.safetensors: expected a curve"),
        ([".", "--lam", "1,1,1"], ".: expected a curve"),
        (["nogain.safetensors", "--lam", "1,1,1"], "nogain.safetensors: .*gain"),
        (["nosigmas.safetensors", "--lam", "1,1,1"], "nosigmas.safetensors: .*sigmas"),
        (["names.safetensors", "--lam", "1,1"], "names.safetensors: .*2 reward names"),
        (["partly.safetensors", "--lam", "1,1,1"], "partly.safetensors: .*row 2"),
        (["c.safetensors", "--lam", "1,1"], "--lam: expected 3 budgets"),
        (["c.safetensors", "--lam", "1,x,1"], "--lam: .*1,x,1.*2,1,1,1"),
        (["c.safetensors", "--lam="], "--lam"),
        (["c.safetensors", "--lam=-1,1,1"], "--lam: .*>= 0"),
        (["c.safetensors", "--lam=0,0,0"], "--lam: .*not all zero"),
        (["c.safetensors"], "--lam"),
        (["c.safetensors", "--lam", "1,1,1", "--tau", "0"], "--tau: .*> 0"),
        (["c.safetensors", "--lam", "1,1,1", "--tau", "nan"], "--tau: .*> 0"),
        (["c.safetensors", "--lam", "1,1,1", "--tau", "warm"], "--tau"),
        (["c.safetensors", "--lam", "1,1,1", "--plot", "no/W.png"], "--plot no/W.png.*existing"),
        (["c.safetensors", "--lam", "1,1,1", "--plot", "W.jpg"], "--plot W.jpg.*png"),
        (["c.safetensors", "--lam", "1,1", "--plot", "W.png"], "--lam"),
    ],
)
def test_command_line_mistakes_are_one_line_and_write_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    gain = write_curve("c.safetensors")
    gain[2, 1] = math.nan
    write_curve("partly.safetensors", gain=gain)
    write_curve("nogain.safetensors", drop=("gain",))
    write_curve("nosigmas.safetensors", drop=("sigmas",))
    write_curve("names.safetensors", names="ocr,clipscore")
    data = (tmp_path / "c.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-8])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("gain 1 2")
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as stop:
        sk.main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
    assert re.search(message, err), err
    assert {p.name for p in tmp_path.iterdir()} == before


# ---------------------------------------------------------------- nft_loss.py


def images(B=6, shape=(2, 3, 3), seed=0, t=None):
    """v, v_old, x_t, x0, t, r and the target velocity, float64."""
    generator = torch.Generator().manual_seed(seed)
    v, v_old, x0, noise = torch.randn(4, B, *shape, generator=generator, dtype=torch.float64)
    r, u = torch.rand(2, B, generator=generator, dtype=torch.float64)
    t = 0.1 + 0.9 * u if t is None else torch.full_like(u, t)
    s = t.view(B, *[1] * len(shape))
    return v, v_old, (1 - s) * x0 + s * noise, x0, t, r, noise - x0


@pytest.mark.parametrize("beta", [1.0, 0.1, 2.5])
def test_x0_form_is_t_squared_over_beta_times_the_velocity_form(beta):
    v, v_old, xt, x0, t, r, target = images()
    loss = nft.nft_loss(v, v_old, xt, x0, t, r, beta, adaptive=False)
    for b in range(6):  # the printed form, one image at a time, in numpy
        n = [x[b].numpy() for x in (v, v_old, target)]
        positive = np.mean(((1 - beta) * n[1] + beta * n[0] - n[2]) ** 2)
        negative = np.mean(((1 + beta) * n[1] - beta * n[0] - n[2]) ** 2)
        printed = r[b].item() * positive + (1 - r[b].item()) * negative
        assert loss[b].item() == pytest.approx(t[b].item() ** 2 / beta * printed, rel=1e-12)


def test_adaptive_weight_is_per_image():
    v, v_old, xt, x0, t, r, target = images()
    loss = nft.nft_loss(v, v_old, xt, x0, t, r, beta=0.5)
    for b in range(6):  # every image as if it were alone, the weights written out
        total = 0.0
        for sign, share in ((1, r[b]), (-1, 1 - r[b])):
            side = (1 - sign * 0.5) * v_old[b] + sign * 0.5 * v[b]
            error = (xt[b] - t[b] * side) - x0[b]
            total += share / 0.5 * (error**2).sum() / max(error.abs().sum().item(), 1e-5)
        assert loss[b].item() == pytest.approx(total.item(), rel=1e-12)
    loud = target.clone()
    loud[0] *= 1e3  # one image's error, and only its loss, grows
    scaled = nft.nft_loss(v + loud, v_old + loud, xt, x0, t, r)
    same = nft.nft_loss(v + target, v_old + target, xt, x0, t, r)
    assert torch.equal(scaled[1:], same[1:]) and scaled[0] > 100 * same[0]


def test_adaptive_weight_is_a_constant_to_the_derivative():
    v, v_old, xt, x0, t, r, target = images(B=1)
    v.requires_grad_()
    (gradient,) = torch.autograd.grad(nft.nft_loss(v, v_old, xt, x0, t, r).sum(), v)
    plus, minus = t * (target - v.detach()), t * (target - (2 * v_old - v.detach()))
    right = (-r * plus / plus.abs().mean() + (1 - r) * minus / minus.abs().mean()) * 2 * t / 18
    assert (gradient - right).abs().max() < 1e-13


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_gradient_at_the_old_policy_is_proportional_to_2r_minus_1(beta, adaptive):
    _, v_old, xt, x0, t, _, target = images(B=5, t=0.7)
    r = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    v = v_old.clone().requires_grad_()
    loss = nft.nft_loss(v, v_old, xt, x0, t, r, beta, adaptive)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    right = 2 / 18 * 0.7**2 * (2 * r - 1).view(5, 1, 1, 1) * (v_old - target)
    if adaptive:
        right = right / (0.7 * (v_old - target)).abs().mean((1, 2, 3), keepdim=True)
    assert (gradient - right).abs().max() < 1e-14 and gradient[2].abs().max() < 1e-15
    # the value, meanwhile, does not depend on r, only on beta
    for other in (torch.zeros_like(r), torch.ones_like(r)):
        moved = nft.nft_loss(v_old, v_old, xt, x0, t, other, beta, adaptive)
        assert (moved - loss.detach()).abs().max() < 1e-13


def test_gradient_agrees_with_finite_differences():
    v, v_old, xt, x0, t, r, _ = images(B=2, shape=(3,))
    assert torch.autograd.gradcheck(
        lambda v: nft.nft_loss(v, v_old, xt, x0, t, r, 0.3, adaptive=False), v.requires_grad_()
    )
    # at v_old along the whole direction (target - v_old): a good sample pulls towards its target
    _, v_old, xt, x0, t, _, target = images(B=2, shape=(3,))
    r, step = torch.tensor([1.0, 0.0], dtype=torch.float64), 1e-6
    ahead, back = (
        nft.nft_loss(v_old + s * (target - v_old), v_old, xt, x0, t, r, adaptive=False)
        for s in (step, -step)
    )
    slope = (ahead - back) / (2 * step)
    right = -2 * t**2 * (2 * r - 1) * (target - v_old).square().mean(1)
    assert (slope / right - 1).abs().max() < 1e-6


def test_gradient_reaches_only_the_trained_velocity():
    v, v_old, xt, x0, t, r, _ = images()
    inputs = [x.requires_grad_() for x in (v, v_old, xt, x0)]
    nft.nft_loss(*inputs, t, r).sum().backward()
    assert v.grad.abs().max() > 0 and all(x.grad is None for x in inputs[1:])


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_minimiser_is_the_old_velocity_plus_the_reward_covariance(beta):
    # 40 clean samples of one noisy state; v_old is their mean target, as for a trained old policy.
    generator = torch.Generator().manual_seed(1)
    x0 = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    xt, t = torch.tensor([[0.3, -1.0, 0.5]], dtype=torch.float64).expand(40, 3), 0.6
    r = torch.sigmoid(x0 @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    target = (xt - x0) / t
    v_old = target.mean(0)
    v = v_old.clone().requires_grad_()
    solver = torch.optim.LBFGS([v], line_search_fn="strong_wolfe", tolerance_grad=1e-13)
    levels = torch.full((40,), t, dtype=torch.float64)

    def closure():
        solver.zero_grad()
        both = v.expand(40, 3), v_old.expand(40, 3)
        loss = nft.nft_loss(*both, xt, x0, levels, r, beta, adaptive=False).mean()
        loss.backward()
        return loss

    for _ in range(5):
        solver.step(closure)
    covariance = ((r - r.mean())[:, None] * (target - v_old)).mean(0)
    assert (v.detach() - v_old - 2 / beta * covariance).abs().max() < 1e-8
    assert covariance.abs().max() > 0.1


def test_weighting_losses_is_weighting_rewards():
    v, v_old, xt, x0, t, _, _ = images(B=8)
    generator = torch.Generator().manual_seed(2)
    r = torch.rand(3, 8, generator=generator, dtype=torch.float64)
    W = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    j = torch.tensor([0, 1, 2, 3, 4, 0, 4, 2])
    v.requires_grad_()
    r_mix, coef = nft.credit(W, j, r)
    mixed = coef * nft.nft_loss(v, v_old, xt, x0, t, r_mix)
    weighted = sum(5 * W[i, j] * nft.nft_loss(v, v_old, xt, x0, t, r[i]) for i in range(3))
    assert (mixed - weighted).abs().max() < 1e-13
    gradients = [torch.autograd.grad(x.sum(), v, retain_graph=True)[0] for x in (mixed, weighted)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-14


def test_a_perfect_prediction_is_a_finite_zero():
    _, _, xt, x0, t, r, target = images()
    v = target.clone().requires_grad_()
    loss = nft.nft_loss(v, target, xt, x0, t, r)
    loss.sum().backward()
    assert loss.detach().abs().max() < 1e-20 and v.grad.isfinite().all()
    clean = nft.nft_loss(v, target, x0, x0, torch.zeros(6), r)  # t = 0: nothing to predict
    assert torch.equal(clean.detach(), torch.zeros(6, dtype=torch.float64))
    exact = torch.zeros(2, 4)
    assert torch.equal(
        nft.nft_loss(exact, exact, exact, exact, torch.ones(2), torch.ones(2)),
        torch.zeros(2, dtype=torch.float64),
    )


def test_half_precision_velocities_are_computed_in_float64():
    v, v_old, xt, x0, t, r, _ = images()
    short = [x.bfloat16() for x in (v, v_old)]
    loss = nft.nft_loss(*short, xt.float(), x0.float(), t.float(), r.float())
    right = nft.nft_loss(*[x.double() for x in short], xt, x0, t, r)
    assert loss.dtype == torch.float64 and (loss / right - 1).abs().max() < 1e-5
    leaf = short[0].requires_grad_()
    nft.nft_loss(leaf, short[1], xt, x0, t, r).sum().backward()
    assert leaf.grad.dtype == torch.bfloat16 and leaf.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(4, 2)}, "^v, v_old, xt, x0: "),
        ({"x0": torch.zeros(3, 1)}, "^v, v_old, xt, x0: "),
        ({"v_old": torch.zeros(1, 2)}, "^v, v_old, xt, x0: "),
        ({"t": torch.zeros(3, 1)}, "^t, r: "),
        ({"r": torch.zeros(2)}, "^t, r: "),
        ({"t": torch.tensor(0.5)}, "^t, r: "),
        ({"t": torch.tensor([0.5, 1.5, 0])}, r"^t: expected numbers in \[0, 1\]"),
        ({"t": torch.tensor([500, 750, 250])}, "^t: "),
        ({"r": torch.tensor([-0.1, 0.5, 0])}, "^r: "),
        ({"r": torch.tensor([NAN, 0.5, 0])}, "^r: "),
        ({"beta": 0}, "^beta: .*> 0"),
        ({"beta": -0.1}, "^beta: "),
        ({"beta": NAN}, "^beta: "),
        ({"beta": INF}, "^beta: "),
    ],
)
def test_nft_loss_refuses_what_would_broadcast_or_make_no_sense(change, message):
    good = {name: torch.zeros(3, 2) for name in ("v", "v_old", "xt", "x0")}
    good |= {"t": torch.full((3,), 0.5), "r": torch.full((3,), 0.5)}
    assert nft.nft_loss(**good).shape == (3,)
    with pytest.raises(ValueError, match=message):
        nft.nft_loss(**(good | change))


def test_optimality_at_the_five_points():
    r = nft.optimality([-INF, -5, 0, 5, INF])
    assert torch.equal(r, torch.tensor([0, 0, 0.5, 1, 1], dtype=torch.float64))
    r = nft.optimality(torch.tensor([[-1.5, 1.5], [-7.0, 7.0]]), clip=3)
    assert torch.equal(r, torch.tensor([[0.25, 0.75], [0, 1]], dtype=torch.float64))


def test_optimality_refuses_nan_and_a_senseless_clip():
    with pytest.raises(ValueError, match="^advantage: "):
        nft.optimality([0.0, NAN])
    for clip in (0, -1, NAN, INF):
        with pytest.raises(ValueError, match="^clip: "):
            nft.optimality([0.0], clip=clip)


def test_group_and_global_std_differ_as_in_the_hand_example():
    reward, group = [0, 1, 0, 0.01], [7, 7, 3, 3]
    own = nft.group_advantage(reward, group, std="group")
    # stds .5 and .005, each plus 1e-4
    right = torch.tensor([-0.5 / 0.5001, 0.5 / 0.5001, -0.005 / 0.0051, 0.005 / 0.0051])
    assert (own - right).abs().max() < 1e-6
    whole = nft.group_advantage(reward, group, std="global")
    # mean .2525, mean square .250025, so std sqrt(.250025 - .06375625) = .431588
    right = torch.tensor([-0.5, 0.5, -0.005, 0.005]) / 0.431688
    assert (whole - right).abs().max() < 1e-5
    assert torch.equal(whole, nft.group_advantage(reward, group))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("std", ["group", "global"])
def test_a_reward_that_is_not_finite_poisons_nothing(bad, std):
    advantage = nft.group_advantage([1, bad, 3], [0, 0, 0], std=std)
    assert (advantage - torch.tensor([-1.0, 0, 1])).abs().max() < 1.1e-4 and advantage[1] == 0
    rest = [0.3, 0.9, 0.5]
    whole = nft.group_advantage([1, bad, 3, *rest], [0, 0, 0, 1, 1, 1], std=std)
    without = nft.group_advantage([1, 3, *rest], [0, 0, 1, 1, 1], std=std)
    assert torch.equal(whole[[0, 2, 3, 4, 5]], without)
    lost = nft.group_advantage([bad, bad, *rest], [0, 0, 1, 1, 1], std=std)  # a whole group
    assert torch.equal(lost[:2], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(lost[2:], nft.group_advantage(rest, [1, 1, 1], std=std))


def test_a_reward_with_nothing_finite_stops_and_names_its_row():
    with pytest.raises(ValueError, match="row 1"):
        nft.group_advantage([[1, 2, 3], [NAN, INF, NAN]], [0, 0, 0])


@pytest.mark.parametrize("offset", [0.0, 0.1, 0.987654321, 1e8 / 3, 1e15])
@pytest.mark.parametrize("std", ["group", "global"])
def test_constant_groups_get_exactly_zero_at_any_offset(offset, std):
    reward = torch.full((7,), offset, dtype=torch.float64)
    zero = torch.zeros(7, dtype=torch.float64)
    advantage = nft.group_advantage(reward, [0, 0, 0, 1, 1, 1, 1], std=std)
    assert torch.equal(advantage, zero) and (nft.optimality(advantage) == 0.5).all()
    assert torch.equal(nft.group_advantage(reward.float(), [0] * 7, std=std), zero)
    live = nft.group_advantage(reward.tolist() + [0, 1], [0] * 7 + [1, 1], std=std)
    assert torch.equal(live[:7], zero) and live[8] > 0  # constant beside a live group


def test_a_large_offset_costs_no_accuracy():
    reward = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    for std in ("group", "global"):
        plain = nft.group_advantage(reward, [0, 0, 1, 1], std)
        assert (nft.group_advantage(reward + 2.0**40, [0, 0, 1, 1], std) - plain).abs().max() < 1e-9


@pytest.mark.parametrize("std", ["group", "global"])
def test_one_image_per_group_has_no_advantage(std):
    advantage = nft.group_advantage([0.2, 0.9, 0.4], [2, 0, 1], std=std)
    assert torch.equal(advantage, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("std", ["group", "global"])
def test_rewards_are_normalised_one_by_one_and_their_unit_drops_out(std):
    generator = torch.Generator().manual_seed(3)
    reward = torch.rand(3, 24, generator=generator, dtype=torch.float64)
    group = torch.arange(24) % 4
    advantage = nft.group_advantage(reward, group, std)
    scaled = nft.group_advantage(reward * torch.tensor([[1.0], [100], [1]]), group, std)
    assert torch.equal(scaled[[0, 2]], advantage[[0, 2]])  # the other rewards do not see it
    assert (scaled[1] - advantage[1]).abs().max() < 1e-3  # 1e-4 (eps) over a std of about .3
    for i in range(3):
        assert torch.equal(nft.group_advantage(reward[i], group, std), advantage[i])
    order = torch.randperm(24, generator=generator)
    mixed = nft.group_advantage(reward[:, order], group[order], std)
    assert (mixed - advantage[:, order]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": [0, 0]}, "^group: expected 3 integers"),
        ({"group": [0.0, 0.0, 1.0]}, "^group: expected 3 integers"),
        ({"group": ["a cat", "a cat", "a dog"]}, "^group: expected integers"),
        ({"group": [True, True, False]}, "^group: "),
        ({"reward": torch.zeros(2, 2, 3)}, "^reward: "),
        ({"reward": 1.0}, "^reward: "),
        ({"reward": [], "group": []}, "^reward: "),
        ({"std": "batch"}, "^std: expected 'global' or 'group'"),
        ({"eps": 0}, "^eps: "),
        ({"eps": NAN}, "^eps: "),
    ],
)
def test_group_advantage_says_which_argument_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        nft.group_advantage(**({"reward": [1, 2, 3], "group": [0, 0, 1]} | change))


def test_credit_by_hand():
    W = [[0.3, 0.1, 0], [0.1, 0.3, 0], [0.1, 0, 0]]
    r = torch.tensor([[1.0, 1, 1, 0], [0, 0, 1, 1], [0.5, 1, 0, 0]], dtype=torch.float64)
    r_mix, coef = nft.credit(W, [0, 1, 2, 1], r)
    # step 0: (.3 + .05) / .5; step 1: .1 / .4 and .3 / .4; step 2: nobody's
    assert (r_mix - torch.tensor([0.7, 0.25, 0.5, 0.75])).abs().max() < 1e-7
    assert (coef - torch.tensor([1.5, 1.2, 0, 1.2])).abs().max() < 1e-7
    assert r_mix[2] == 0.5 and coef[2] == 0


def test_equal_columns_give_a_coefficient_of_exactly_one():
    j = torch.arange(10)
    for seed in range(10):
        gain, lam = random_curves(4, 10, seed)
        r = torch.rand(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for W in (sk.sinkhorn(gain, lam)[0], sk.static_weights(lam, 10)):
            for stored in (W, W.float()):
                assert torch.equal(nft.credit(stored, j, r)[1], torch.ones(10).double())
        static, _ = nft.credit(sk.static_weights(lam, 10), j, r)
        assert (static - (lam @ r) / lam.sum()).abs().max() < 1e-14
    # without Sinkhorn the columns differ, and so do the coefficients; they average to 1
    W = sk.row_weights(gain, lam)
    coef = nft.credit(W, j, r)[1]
    assert (coef - 10 * W.sum(0)).abs().max() < 1e-6 and coef.std() > 0.1
    assert coef.mean().item() == pytest.approx(1, abs=1e-6)


def test_a_reward_with_all_the_weight_is_the_mix_and_a_half_stays_a_half():
    gain, _ = random_curves(3, 5, seed=0)
    r = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    r_mix, _ = nft.credit(sk.sinkhorn(gain, [0, 1, 0])[0], torch.arange(5), r)
    assert (r_mix - r[1]).abs().max() < 1e-15
    W = sk.sinkhorn(gain, [1, 2, 3])[0]
    for value in (0.0, 0.5, 1.0):
        r_mix, _ = nft.credit(W, torch.arange(5), torch.full((3, 5), value))
        assert torch.equal(r_mix, torch.full((5,), value, dtype=torch.float64))


def test_a_mix_of_m_rewards_has_one_over_root_m_of_the_contrast():
    generator = torch.Generator().manual_seed(4)
    advantage = torch.randn(4, 100_000, generator=generator, dtype=torch.float64)
    r = nft.optimality(advantage)
    r_mix, _ = nft.credit(sk.static_weights([1] * 4, 2), torch.zeros(100_000, dtype=torch.int64), r)
    ratio = (2 * r_mix - 1).abs().mean() / (2 * r - 1).abs().mean()
    assert ratio.item() == pytest.approx(1 / 2, abs=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": [[0.5, -0.1], [0.2, 0.2]]}, "^W: .*>= 0"),
        ({"W": [[0.5, NAN], [0.2, 0.2]]}, "^W: .*finite"),
        ({"W": [[0.5, 0.5]]}, "^W, r: "),
        ({"W": [0.5, 0.5]}, "^W, r: "),
        ({"r": [0.5, 0.5]}, "^W, r: "),
        ({"r": [[0.5, 1.5], [0, 0]]}, "^r: "),
        ({"r": [[0.5, NAN], [0, 0]]}, "^r: "),
        ({"j": [0, 2]}, "^j: expected steps 0 to 1"),
        ({"j": [-1, 0]}, "^j: "),
        ({"j": [0]}, "^j: expected 2 integers"),
        ({"j": [0.5, 1.0]}, "^j: expected 2 integers"),
    ],
)
def test_credit_says_which_argument_is_wrong(change, message):
    good = {"W": [[0.25, 0.25], [0.25, 0.25]], "j": [0, 1], "r": [[0.5, 1], [0, 0]]}
    nft.credit(**good)
    with pytest.raises(ValueError, match=message):
        nft.credit(**(good | change))


@pytest.mark.parametrize(
    ("recipe", "table"),
    [
        (1, {0: 0, 1: 0.001, 250: 0.25, 499: 0.499, 500: 0.5, 501: 0.5, 100_000: 0.5}),
        (2, {0: 0, 74: 0, 75: 0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 10_000: 0.999}),
    ],
)
def test_decay_of_the_old_policy_by_the_table(recipe, table):
    for step, right in table.items():
        assert nft.old_policy_decay(step, recipe) == pytest.approx(right, abs=1e-15)


def test_decay_refuses_unknown_recipes_and_negative_steps():
    for step, recipe in ((-1, 1), (0, 0), (0, 3), (0, "fast"), (NAN, 2)):
        with pytest.raises(ValueError, match="step, recipe"):
            nft.old_policy_decay(step, recipe)


def test_adaptive_loss_lowers_itself_under_descent_from_the_old_policy():
    _, v_old, xt, x0, t, r, target = images(B=16, seed=5)
    v = v_old.clone().requires_grad_()
    before = (2 * r - 1) * (v_old - target).square().mean((1, 2, 3))
    for _ in range(20):
        (gradient,) = torch.autograd.grad(nft.nft_loss(v, v_old, xt, x0, t, r).sum(), v)
        v = (v - 0.1 * gradient).detach().requires_grad_()
    after = (2 * r - 1) * (v.detach() - target).square().mean((1, 2, 3))
    assert (after < before).all()  # good samples are approached, bad ones left


# ------------------------------------------------------------------ rewards.py


def drawn(words, size=64, font_size=20, top=40, seed=0):
    """(B,3,size,size) pictures: a coloured shape above, each word below (drawn with Pillow)."""
    rng, font, pictures = random.Random(seed), ImageFont.load_default(font_size), []
    for word in words:
        ground, ink = rng.choice([("white", "black"), ("#c8dcff", "black"), ("#3c3c50", "white")])
        picture = Image.new("RGB", (size, size), ground)
        draw = ImageDraw.Draw(picture)
        x, y = rng.randint(8, size - 24), rng.randint(4, 14)
        draw.ellipse((x, y, x + 16, y + 16), fill=rng.choice(["#dc2828", "#f0d232", "#28a03c"]))
        draw.text((size // 2, top), word, font=font, fill=ink, anchor="ma", stroke_width=0.5)
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pictures.append(pixels.view(size, size, 3).permute(2, 0, 1) / 255)
    return torch.stack(pictures)


def asking(words):
    return [f'a red circle with the text "{word}"' for word in words], [{} for _ in words]


def batch(B=3):
    return torch.full((B, 3, 8, 8), 0.5), ["a"] * B, [{}] * B


@pytest.mark.parametrize("prompt, text", [
    ('a sign "CAT"', "CAT"),
    ("a sign “CAT”", "CAT"),
    ("ein Schild „KATZE“ hier", "KATZE"),
    ("une affiche « CHAT »", "CHAT"),
    ("写着「猫」的牌子", "猫"),
    ('写着"你好"的牌子', "你好"),
    ("a sign 'CAT' here", "CAT"),
    ("a sign ‘CAT’.", "CAT"),
    ('"HELLO" over "WORLD"', "HELLO WORLD"),
    ('“HELLO” over "WORLD"', "HELLO WORLD"),
    ('a sign "  two words "', "two words"),
    ("it's the dog's bowl, \"REX\"", "REX"),
    ('a rock \'n\' roll bar "LOUD"', "LOUD"),
    ("it’s a sign ‘don’t panic’", "don’t panic"),
    ("the dogs' sign 'don't run', it's red", "don't run"),
    ('a poster "say \'hi\'"', "say 'hi'"),
    ('“say "hi" now”', 'say "hi" now'),
])
def test_quoted_text_is_what_the_prompt_wants_drawn(prompt, text):
    assert rewards.quoted_text(prompt) == text


@pytest.mark.parametrize("prompt, fault", [
    ("a red circle", "no quoted text"),
    ("", "no quoted text"),
    ("it's the dogs' bowl, isn't it", "no quoted text"),
    ("a toy of the '80s", "no quoted text"),
    ('a sign ""', "empty quotes"),
    ("a sign “ ”", "empty quotes"),
    ("a sign ''", "empty quotes"),
    ('a sign "\u200b"', "empty quotes"),
    ('a sign "CAT" and ""', "empty quotes"),
    ('a sign "CAT', "unpaired quote"),
    ('a 5" nail and "CAT"', "unpaired quote"),
    ('a sign “CAT"', "unpaired quote"),
])
def test_a_prompt_without_clear_quoted_text_is_refused_with_the_fault(prompt, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        rewards.quoted_text(prompt)
    assert repr(prompt) in str(caught.value)


def test_edit_distance_equals_the_brute_force_recursion():
    @functools.cache
    def recursion(a, b):  # try all three edits on the first letter
        if not a or not b:
            return len(a) + len(b)
        substituted = recursion(a[1:], b[1:]) + (a[0] != b[0])
        return min(substituted, recursion(a[1:], b) + 1, recursion(a, b[1:]) + 1)

    rng = random.Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choices("abc", k=rng.randint(0, 7))) for _ in range(2))
        assert rewards.edit_distance(a, b) == recursion(a, b), (a, b)
    assert rewards.edit_distance("kitten", "sitting") == 3


@pytest.mark.parametrize("read, target, expected", [
    ("CAT", "CAT", 1),
    ("cat", "CAT", 1),
    ("C A\nT", "CAT", 1),  # whitespace is dropped
    ("shop CAT open", "CAT", 1),  # found inside what was read
    ("CUT", "CAT", 2 / 3),
    ("CA", "CAT", 2 / 3),
    ("", "CAT", 0),
    ("a completely different line", "CAT", 0),  # the distance is capped at the length
    ("ＣＡＴ", "CAT", 1),  # full width
    ("cafe\u0301", "CAFÉ", 1),  # combining accent
    ("STRASSE", "Straße", 1),
    ("don't", "don’t", 1),
    ("HELLO WORLD", "HELLO\u200b WORLD", 1),
    ("HELLO", "HELLO WORLD", 0.5),
])
def test_text_score_follows_the_peers_rule(read, target, expected):
    assert rewards.text_score(read, target) == pytest.approx(expected, abs=1e-12)


def test_text_score_refuses_an_empty_target():
    with pytest.raises(ValueError, match="empty"):
        rewards.text_score("CAT", " ")


def test_ocr_reads_small_drawn_words_and_not_others():
    rng = random.Random(0)
    words = ["".join(rng.sample("ABCDEFGHKLMNPRSTUVXYZ", 3)) for _ in range(24)]
    images, (prompts, metadata) = drawn(words), asking(words)
    right = rewards.ocr(images, prompts, metadata)
    wrong = rewards.ocr(images, prompts[1:] + prompts[:1], metadata)
    assert right.shape == (24,) and right.dtype == torch.float32
    assert (right == 1).float().mean() > 0.85, right
    assert (wrong == 1).sum() == 0 and wrong.mean() < 0.3, wrong


def test_ocr_reads_several_quoted_parts_in_a_large_picture():
    images = drawn(["Grand Opening\nToday at Nine"], size=512, font_size=48, top=200)
    prompts = ["a shop, “Grand Opening” above “today at nine”", 'a shop "Closed for Winter"']
    result = rewards.ocr(images.expand(2, -1, -1, -1), prompts, [{}, {}])
    assert result[0] == 1 and result[1] < 0.5


def test_swapping_one_image_changes_one_ocr_score():
    words = ["CAT", "DOG", "SUN", "HEN"]
    images, (prompts, metadata) = drawn(words), asking(words)
    before = rewards.ocr(images, prompts, metadata)
    images[2] = drawn(["BOX"])[0]
    after = rewards.ocr(images, prompts, metadata)
    assert before[2] == 1 and after[2] < 1
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])


def test_ocr_gives_an_empty_picture_zero_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rewards.ocr(*batch(1)[:1], ['"CAT"'], [{}]).tolist() == [0]


def test_ocr_drops_symbols_for_shapes_unless_the_prompt_wants_them(monkeypatch):
    lines = types.SimpleNamespace(txts=("■★CUT",))
    monkeypatch.setattr(rewards, "ocr_engine", lambda: lambda picture: lines)
    result = rewards.ocr(batch(2)[0], ['"CAT"', '"★CAT"'], [{}, {}])
    torch.testing.assert_close(result, torch.tensor([2 / 3, 3 / 4]))


def test_ocr_hands_the_engine_blue_green_red_bytes(monkeypatch):
    seen = []
    engine = lambda picture: seen.append(picture) or types.SimpleNamespace(txts=None)  # noqa: E731
    monkeypatch.setattr(rewards, "ocr_engine", lambda: engine)
    red = torch.tensor([1.0, 0.25, 0.0]).view(1, 3, 1, 1).expand(1, 3, 4, 6)
    rewards.ocr(red, ['"CAT"'], [{}])
    assert seen[0].shape == (4, 6, 3) and seen[0][0, 0].tolist() == [0, 64, 255]


def failing_engine(error, on):
    calls = iter(range(1000))

    def engine(picture):
        if next(calls) in on:
            raise error
        return types.SimpleNamespace(txts=("CAT",))
    return lambda: engine


def test_one_picture_the_ocr_engine_fails_on_is_nan_and_counted(monkeypatch):
    from rapidocr import LoadImageError
    monkeypatch.setattr(rewards, "ocr_engine", failing_engine(LoadImageError("odd"), on={1}))
    with pytest.warns(UserWarning, match="failed on 1 of 3 images") as caught:
        result = rewards.ocr(batch()[0], ['"CAT"'] * 3, [{}] * 3)
    assert len(caught) == 1
    assert result[[0, 2]].tolist() == [1, 1] and result[1].isnan()


def test_an_ocr_engine_that_fails_on_every_picture_stops_the_run(monkeypatch):
    from rapidocr import LoadImageError
    monkeypatch.setattr(rewards, "ocr_engine", failing_engine(LoadImageError("odd"), range(9)))
    with pytest.raises(RuntimeError, match="reward ocr: the engine failed on 3 of 3"):
        rewards.ocr(batch()[0], ['"CAT"'] * 3, [{}] * 3)


def test_a_changed_ocr_api_is_not_taken_for_a_bad_picture(monkeypatch):
    monkeypatch.setattr(rewards, "ocr_engine", lambda: lambda picture: ("CAT", 0.9))
    with pytest.raises(AttributeError):
        rewards.ocr(batch()[0], ['"CAT"'] * 3, [{}] * 3)


def test_ocr_is_built_once_and_from_the_wheel_without_a_download(monkeypatch):
    from rapidocr.utils.download_file import DownloadFile

    def refuse(*args):
        raise AssertionError("tried to download")
    monkeypatch.setattr(DownloadFile, "run", refuse)
    rewards.ocr_engine.cache_clear()
    assert rewards.ocr(drawn(["CAT"]), ['"CAT"'], [{}]).tolist() == [1]
    assert rewards.ocr_engine() is rewards.ocr_engine()


def test_your_own_reward_takes_five_lines(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text('''
def brightness(images, prompts, metadata):
    """Mean brightness, (B,) in [0,1]."""
    return images.mean(dim=(1, 2, 3))
''')
    monkeypatch.chdir(tmp_path)
    loaded = rewards.load_rewards(["my_rewards.py:brightness", "ocr"], "cpu")
    assert list(loaded) == ["brightness", "ocr"]
    images, prompts = drawn(["CAT", "DOG"]), ['"CAT"', '"DOG"']
    result = rewards.score(loaded, images, prompts, [{}, {}])
    assert result.dtype == torch.float64 and result.shape == (2, 2)
    torch.testing.assert_close(result[0], images.mean(dim=(1, 2, 3)).double())
    assert result[1].tolist() == [1, 1]


def test_a_reward_file_is_found_in_the_working_directory_first_then_beside_rewards(
    tmp_path, monkeypatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, number in (here, 1), (there, 2):
        folder.mkdir()
        (folder / "both_places.py").write_text(f"def f(*_):\n    return {number}\n")
    (there / "one_place.py").write_text("def f(*_):\n    return 3\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(rewards, "__file__", str(there / "rewards.py"))
    assert rewards.load_function("both_places.py:f")() == 1
    assert rewards.load_function(f"{there}/both_places.py:f")() == 2
    assert rewards.load_function("one_place.py:f")() == 3


def test_a_reward_file_is_executed_once(tmp_path, monkeypatch):
    log = tmp_path / "log"
    source = f"open({str(log)!r}, 'a').write('x')\ndef f(*_): pass\ndef g(*_): pass\n"
    (tmp_path / "counted_a.py").write_text(source)
    (tmp_path / "counted_b.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    rewards.load_rewards(["counted_a.py:f", f"{tmp_path}/counted_a.py:g"], "cpu")
    import counted_a  # noqa: F401  (after it was loaded by path)
    assert log.read_text() == "x"
    import counted_b  # before it is loaded by path
    assert rewards.load_function("counted_b.py:f") is counted_b.f
    assert log.read_text() == "xx"


def test_a_reward_file_that_fails_is_read_again_after_the_repair(tmp_path):
    path = tmp_path / "half_done.py"
    path.write_text("def f(*_):\n    return 1\nraise KeyError('oops')\n")
    with pytest.raises(KeyError, match="oops"):
        rewards.load_function(f"{path}:f")
    path.write_text("def f(*_):\n    return 22222\n")
    assert rewards.load_function(f"{path}:f")() == 22222


def test_a_reward_file_never_replaces_another_module(tmp_path):
    for stem in "json", "rewards", "chunk":  # in use, in use, a free name of the standard library
        before = sys.modules.get(stem)
        (tmp_path / f"{stem}.py").write_text("def f(*_):\n    return 1\n")
        assert rewards.load_function(f"{tmp_path / stem}.py:f")() == 1
        assert sys.modules.get(stem) is before


@pytest.mark.parametrize("names, parts", [
    (["orc"], ["'orc'", "ocr", "file.py:function"]),
    ([""], ["''", "ocr", "file.py:function"]),
    (["mine.py"], ["'mine.py'", "file.py:function"]),
    (["absent.py:f"], ["'absent.py:f'", "no such file", "absent.py"]),
    (["notes.txt:f"], ["'notes.txt:f'", "file.py:function"]),
    (["mine.py:absent"], ["'mine.py:absent'", "no function 'absent'", "bright, dark"]),
    (["mine.py:number"], ["'mine.py:number'", "no function 'number'"]),
    (["mine.py:"], ["'mine.py:'", "no function ''"]),
    (["ocr", "ocr"], ["'ocr'", "ocr is taken"]),
    (["mine.py:dark", "other.py:dark"], ["'other.py:dark'", "dark is taken"]),
])
def test_a_reward_that_cannot_be_loaded_is_named_with_what_is_right(
    tmp_path, monkeypatch, names, parts
):
    source = "import math\nnumber = 3\ndef bright(*_): pass\ndef dark(*_): pass\n"
    for file in "mine.py", "other.py", "notes.txt":
        (tmp_path / file).write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        rewards.load_rewards(names, "cpu")
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_stand_in_never_takes_the_column_of_the_real_model(tmp_path):
    own = ["ocr", "geneval", "detail"]
    (tmp_path / "world.py").write_text("\n".join(f"def {name}(*_): pass" for name in own))
    names = ["ocr"] + [f"{tmp_path}/world.py:{name}" for name in own]
    loaded = rewards.load_rewards(names, "cpu")
    assert list(loaded) == ["ocr", "world.ocr", "world.geneval", "detail"]
    assert loaded["ocr"] is rewards.ocr is not loaded["world.ocr"]


def test_score_keeps_an_isolated_nan_and_the_order_of_the_rewards():
    values = {"b": torch.tensor([1.0, torch.nan, 3.0]), "a": torch.tensor([0.0, 0.5, 2.0]).half()}
    fs = {name: lambda *_, value=value: value for name, value in values.items()}
    result = rewards.score(fs, *batch())
    assert result.dtype == torch.float64 and result.device.type == "cpu"
    assert result[0, [0, 2]].tolist() == [1, 3] and result[0, 1].isnan()
    assert result[1].tolist() == [0, 0.5, 2]


@pytest.mark.parametrize("value, fault", [
    (torch.ones(2), r"\(2, torch.float32\)"),
    (torch.ones(3, 3), r"\(3, 3, torch.float32\)"),  # N x N instead of N
    (torch.ones(3, 1), r"\(3, 1, torch.float32\)"),
    (torch.tensor(1.0), r"\(torch.float32,\)"),
    (torch.ones(3, dtype=torch.bool), "torch.bool"),
    (torch.ones(3, dtype=torch.int64), "torch.int64"),
    (None, "NoneType"),
    ([1.0, 1.0, 1.0], "list"),
    (torch.full((3,), torch.nan), "not finite"),
    (torch.full((3,), torch.inf), "not finite"),
    (torch.tensor([1.0, -0.25, torch.nan]), "-0.25"),
])
def test_score_names_the_reward_that_breaks_its_promise(value, fault):
    fs = {"fine": lambda *_: torch.ones(3), "mine": lambda *_: value}
    with pytest.raises(ValueError, match=f"reward mine.*{fault}"):
        rewards.score(fs, *batch())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -0.5, 255.0])
def test_score_refuses_a_bad_image_before_any_reward_runs_and_names_it(bad):
    images, prompts, metadata = batch()
    images[1, 2, 3, 4] = bad
    with pytest.raises(ValueError, match="image 1: "):
        rewards.score({"never": None}, images, prompts, metadata)


def test_score_refuses_unequal_lengths():
    images, prompts, metadata = batch()
    for wrong in (images[:2], prompts, metadata), (images, prompts[:2], metadata), (
            images, prompts, metadata[:2]), (images[0], prompts, metadata):
        with pytest.raises(ValueError, match=r"must be \(B,3,H,W\), B and B"):
            rewards.score({"never": None}, *wrong)


def test_a_rank_without_images_scores_nothing_and_does_not_fail():
    images, prompts, metadata = batch(0)
    fs = {"ocr": rewards.ocr, "sum": lambda images, *_: images.sum(dim=(1, 2, 3))}
    assert rewards.score(fs, images, prompts, metadata).shape == (2, 0)


def test_score_accepts_exact_white_and_black_in_half_precision():
    for dtype in torch.float16, torch.bfloat16, torch.float32:
        images = torch.tensor([0.0, 1.0], dtype=dtype).view(2, 1, 1, 1).expand(2, 3, 8, 8)
        mean = {"mean": lambda images, *_: images.mean(dim=(1, 2, 3))}
        assert rewards.score(mean, images, ["a"] * 2, [{}] * 2).tolist() == [[0, 1]]


def test_rewards_is_a_leaf_that_imports_only_torch_and_the_standard_library(tmp_path):
    source = Path(rewards.__file__).read_text()
    (tmp_path / "alone.py").write_text(source)  # copied alone into another repo
    code = ("import sys, alone; heavy = {'rapidocr', 'cv2', 'onnxruntime', 'transformers', 'PIL'};"
            "print(sorted(heavy & set(sys.modules)), alone.quoted_text('\"A\"'))")
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert printed.split() == ["[]", "A"]


# ------------------------------------------------------------------ toy.py: world, rewards, judges


@functools.cache
def world(n=200, seed=0):
    """n scenes with a word, their prompts and their perfect pictures."""
    rng = random.Random(seed)
    scenes = [toy.scene(rng, text=True) for _ in range(n)]
    pictures = toy.to_tensor([toy.draw(s, rng) for s in scenes])
    return scenes, [s["prompt"] for s in scenes], pictures


def parsed(prompt):
    """Objects and word of a caption, by another route than the one that wrote it."""
    phrase, _, word = prompt.partition(" with the text ")
    counts = {"a": 1, "an": 1, "two": 2, "three": 3}
    objects = []
    for part in re.split(" (?:left|right) of ", phrase):
        number, colour, shape = part.split()
        objects += [[colour, shape.removesuffix("s")]] * counts[number]
    return objects[::-1] if " right of " in phrase else objects, word.strip('"') or None


def test_captions_say_what_the_facts_say():
    rng = random.Random(3)
    for scene in (toy.scene(rng) for _ in range(300)):
        assert parsed(scene["prompt"]) == (scene["objects"], scene["text"])


def test_every_perfect_picture_gets_full_marks():
    scenes, prompts, pictures = world()
    for reward in (toy.ocr, toy.geneval, toy.strict):
        assert reward(pictures, prompts, scenes).eq(1).all(), reward.__name__


def test_one_changed_fact_is_seen_by_the_checker_it_concerns_and_no_other():
    scenes, prompts, _ = world()
    rng = random.Random(1)
    changed = [toy.mutate(s, rng) for s in scenes]
    pictures = toy.to_tensor([toy.draw(s, rng) for s in changed])
    ocr, strict = toy.ocr(pictures, prompts, scenes), toy.strict(pictures, prompts, scenes)
    geneval = toy.geneval(pictures, prompts, scenes)
    for k, (old, new) in enumerate(zip(scenes, changed)):
        assert ocr[k].item() == pytest.approx(1 if old["text"] == new["text"] else 2 / 3)
        assert (strict[k] == 1) == (old["objects"] == new["objects"]) == (geneval[k] == 1)


def test_geneval_gives_the_hand_counted_share():
    wanted = {"objects": [["red", "circle"], ["blue", "star"]], "text": None}
    drawn_instead = {"objects": [["blue", "circle"], ["red", "star"]], "text": None}
    picture = toy.to_tensor([toy.draw(drawn_instead)])
    # two objects: 1; both colours there: 1; both shapes: 1; no place right: 0
    assert toy.geneval(picture, ["-"], [wanted]).item() == pytest.approx(3 / 4)
    picture = toy.to_tensor([toy.draw({"objects": [["red", "circle"]], "text": None})])
    assert toy.geneval(picture, ["-"], [wanted]).item() == pytest.approx((0 + 0.5 + 0.5 + 0.5) / 4)


def test_detail_falls_with_blur_and_with_noise():
    scenes, prompts, x = world()
    blurred = torch.nn.functional.avg_pool2d(x, 5, 1, 2, count_include_pad=False)
    noisy = x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    clean = toy.detail(x, prompts, scenes)
    assert (toy.detail(blurred, prompts, scenes) < clean - 0.1).all()
    assert (toy.detail(noisy.clamp(0, 1), prompts, scenes) < clean - 0.3).all()


def test_nearest_ignores_the_background_and_sees_another_scene():
    scenes, prompts, pictures = world()
    own = [toy.nearest(toy.to_tensor([toy.draw(s, background=b) for s in scenes[:20]]),
                       prompts[:20], scenes[:20]) for b in toy.BACKGROUNDS]
    assert all(torch.allclose(x, torch.ones(20), atol=1e-5) for x in own)
    assert (toy.nearest(pictures, prompts, scenes) > toy.nearest(
        pictures, prompts, scenes[1:] + scenes[:1])).float().mean() > 0.98


@pytest.mark.parametrize("reward", [toy.clipscore, toy.preference, toy.second_clip])
def test_learned_rewards_prefer_the_right_and_the_clean_picture(reward):
    scenes, prompts, pictures = world()
    rng = random.Random(5)
    wrong = toy.to_tensor([toy.draw(toy.mutate(s, rng), rng) for s in scenes])
    worse = toy.degrade(pictures, torch.Generator().manual_seed(0))
    own = reward(pictures, prompts, scenes)
    assert (own > reward(wrong, prompts, scenes)).float().mean() > 0.75
    assert (own > reward(worse, prompts, scenes)).float().mean() > 0.75
    assert ((own >= 0) & (own <= 1)).all()


def test_swapping_one_picture_changes_one_score_of_every_reward():
    scenes, prompts, pictures = world()
    swapped = pictures[:8].clone()
    swapped[3] = toy.degrade(pictures[60:61], torch.Generator().manual_seed(1))[0]
    functions = (toy.ocr, toy.geneval, toy.strict, toy.clipscore, toy.preference, toy.detail,
                 toy.second_clip, toy.nearest)
    for reward in functions:
        a, b = (reward(x, prompts[:8], scenes[:8]) for x in (pictures[:8], swapped))
        assert (a - b).abs().gt(1e-5).nonzero().flatten().tolist() == [3], reward.__name__


def test_prompt_lists_are_disjoint_deterministic_and_both_formats_agree():
    lists = {}
    for name, n, held, seed in (("toy-train", 512, False, 1), ("toy-heldout", 256, True, 2)):
        prompts, facts = evaluate.load_prompts(HERE / f"prompts/{name}.jsonl")
        assert prompts == evaluate.load_prompts(HERE / f"prompts/{name}.txt")[0]
        assert facts == toy.prompt_list(n, held, seed) and len(set(prompts)) == n
        lists[name] = facts
    for key in ("text", "objects"):
        a, b = ({str(f[key]) for f in facts} for facts in lists.values())
        assert not a & b, key


def test_the_build_makes_every_part_from_nothing(tmp_path, monkeypatch):
    def one_step(loss, params, steps, lr, name):
        opt = torch.optim.SGD([p for p in params if p.requires_grad], lr)
        loss().backward()
        opt.step()

    small = toy.dataset
    monkeypatch.setattr(toy, "minimise", one_step)
    monkeypatch.setattr(toy, "dataset", lambda n, seed: small(64, seed))
    launch("toy.py", "--build", "--out", tmp_path / "toy")
    pipe = evaluate.load_pipeline(str(tmp_path / "toy"), torch.float32, "cpu")
    assert pipe.scheduler.config.shift == toy.SHIFT
    assert (tmp_path / "prompts/toy-train.jsonl").read_bytes() == (
        HERE / "prompts/toy-train.jsonl").read_bytes()
    shapes = [{k: v.shape for k, v in load_file(f / "toy" / name / "model.safetensors").items()}
              for f in (tmp_path, HERE) for name in ("clip", "preference", "judge", "text_encoder")]
    assert shapes[:4] == shapes[4:]
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "toy").rglob("*") if f.is_file()}
    launch("toy.py", "--build", "--out", tmp_path / "toy")                # what is there is kept
    assert before == {f: f.stat().st_mtime_ns for f in before}


# ------------------------------------------------------------------ evaluate.py: a policy's images


@functools.cache
def pipeline():
    return evaluate.load_pipeline("toy", torch.float32, torch.device("cpu"))


@functools.cache
def held_out(n=24):
    prompts, facts = evaluate.load_prompts(HERE / "prompts/toy-heldout.jsonl")
    text, empty = (evaluate.encode_prompts(pipeline(), x, 0) for x in (prompts[:n], [""]))
    return prompts[:n], facts[:n], text, empty


def test_the_toy_is_a_small_stable_diffusion_3_folder_without_pickles():
    from diffusers import StableDiffusion3Pipeline
    assert isinstance(pipeline(), StableDiffusion3Pipeline)
    files = [f for f in (HERE / "toy").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 12 * 2**20
    assert {f.suffix for f in files} <= {".json", ".safetensors", ".txt", ".jinja"}


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_our_sampler_equals_the_call_of_the_diffusers_pipeline(guidance):
    pipe, (prompts, _, text, empty) = pipeline(), held_out()
    noise = evaluate.normal((4, 16, 16), "test", index=range(3))
    theirs = pipe(prompts[:3], latents=noise, num_inference_steps=10, guidance_scale=guidance,
                  max_sequence_length=0, output_type="pt", height=64, width=64).images
    sigmas = evaluate.noise_levels(pipe, 10)
    x0 = evaluate.sample(pipe, tuple(e[:3] for e in text), sigmas, noise, guidance, empty)
    assert torch.allclose(evaluate.decode(pipe, x0), theirs, atol=2e-4)


def test_duplicate_prompts_are_encoded_alike_and_in_order():
    prompts = held_out()[0]
    doubled = evaluate.encode_prompts(pipeline(), [prompts[1], prompts[0], prompts[1]], 0)
    for whole, part in zip(held_out()[2], doubled):
        assert torch.allclose(part, whole[[1, 0, 1]], atol=1e-5)


def test_noise_depends_on_the_index_and_the_key_alone():
    all_at_once = evaluate.normal((2, 3), 7, "sample", 0, index=range(6))
    assert torch.equal(evaluate.normal((2, 3), 7, "sample", 0, index=[4, 1]), all_at_once[[4, 1]])
    others = [evaluate.normal((2, 3), *key, index=[4]) for key in ((8, "sample", 0),
                                                                   (7, "noise", 0),
                                                                   (7, "sample", 1))]
    assert not any(torch.equal(x[0], all_at_once[4]) for x in others)


def test_the_base_is_imperfect_and_guidance_helps():
    pipe, functions = pipeline(), {"ocr": toy.ocr, "strict": toy.strict}
    sigmas = evaluate.noise_levels(pipe, 10)
    plain, _ = evaluate.evaluate(pipe, None, held_out(), sigmas, functions, 12, 64)
    guided, _ = evaluate.evaluate(pipe, None, held_out(), sigmas, functions, 12, 64, guidance=3.0)
    assert 0.3 < plain[0].mean() < 0.9 and 0.15 < plain[1].mean() < 0.8
    assert guided.mean() > plain.mean()


def test_paired_difference_by_hand():
    before, after = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 2.0, 5.0, torch.nan])
    assert evaluate.paired(before, after) == pytest.approx([2.0, 3.0, 1.0, 1 / math.sqrt(3)])


def test_latents_that_are_not_finite_are_refused():
    latents = torch.zeros(2, 4, 16, 16)
    latents[1, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="1 of 2"):
        evaluate.decode(pipeline(), latents)


@pytest.mark.parametrize("name, text, line", [
    ("a.txt", "a cat\n\na dog\n", 2), ("a.txt", "", None), ("a.txt", "x" * 2001, 1),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', 2), ("a.jsonl", '{"text": "a"}', 1),
    ("a.jsonl", "not json", 1), ("a.jsonl", "[1]", 1),
])
def test_a_bad_prompt_list_is_refused_by_file_and_line(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(name) + (f":{line}:" if line else ": expected")):
        evaluate.load_prompts(tmp_path / name)


def test_byte_order_mark_windows_lines_and_emoji_are_read(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa cat\r\na 🐈\r\n".encode())
    assert evaluate.load_prompts(tmp_path / "a.txt")[0] == ["a cat", "a 🐈"]


# ------------------------------------------------------------------ estimate.py


def test_rolling_on_from_a_state_of_the_path_ends_in_its_own_sample():
    pipe, (_, _, text, _) = pipeline(), held_out()
    sigmas, words = evaluate.noise_levels(pipe, 6), tuple(e[:2] for e in text)
    noise = torch.randn(6, 2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    path = estimate.roll(pipe, noise[0], words, sigmas, 0, noise)
    assert len(path) == 7
    assert torch.allclose(estimate.roll(pipe, path[4], words, sigmas, 4, noise)[-1], path[-1])


def test_encoding_then_decoding_keeps_the_perfect_pictures_readable():
    scenes, prompts, pictures = world()
    again = evaluate.decode(pipeline(), estimate.encode(pipeline(), pictures[:40]))
    assert -10 * (again - pictures[:40]).square().mean().log10() > 28                  # dB
    assert toy.ocr(again, prompts[:40], scenes[:40]).mean() > 0.95


def test_a_folder_of_pictures_is_read_prompt_by_prompt(tmp_path):
    lines = []
    for k, colour in enumerate(["red", "green", "blue", "white"]):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{k}.png")
        lines.append(json.dumps({"prompt": "ab"[k % 2], "file": f"{k}.png"}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    images = estimate.read_folder(tmp_path, ["b", "a"], 2, 8)
    assert images[:, :, 0, 0].round(decimals=1).tolist() == [
        pytest.approx(c, abs=0.01) for c in ([0, 0.5, 0], [1, 1, 1], [1, 0, 0], [0, 0, 1])]
    with pytest.raises(ValueError, match="needs 3 files"):
        estimate.read_folder(tmp_path, ["a"], 3, 8)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "file": "../secret.png"}')
    with pytest.raises(ValueError, match="plain file name"):
        estimate.read_folder(tmp_path, ["a"], 1, 8)


PROGRAMS = {"train.py": train, "estimate.py": estimate, "evaluate.py": evaluate,
            "sinkhorn.py": sk, "toy.py": toy}


def launch(script, *flags, processes=1):
    """Run a program and return what it printed: here, or under torchrun as a user would."""
    flags = [str(flag) for flag in flags]
    if processes == 1:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            PROGRAMS[script].main(flags)
        return printed.getvalue()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}",
               "--standalone", str(HERE / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ESTIMATE = ("--P", 3, "--N", 3, "--steps", 3, "--micro-batch", 4)


@pytest.fixture(scope="session")
def curve(tmp_path_factory):
    """A tiny curve of the policy's own samples, and what was printed."""
    out = tmp_path_factory.mktemp("curve") / "own.safetensors"
    flags = (*ESTIMATE, "--proposal", "self", "--estimator", "self", "--out", out)
    return out, launch("estimate.py", *flags)


def test_estimate_announces_the_calls_it_makes_and_writes_a_curve_that_adds_up(curve):
    out, printed = curve
    # 9 states: 3 + 2 + 1 steps of rollouts and 3 steps of the path itself
    assert f"{9 * (6 + 3)} velocity calls" in printed and f"{9 * 4} images" in printed
    file = load_file(out)
    assert torch.allclose(file["gain"].sum(1), file["D"][:, -1])
    assert file["R"].shape == (4, 4, 3, 3, 1)
    D = renyi_divergence(file["R"].double(), estimator="self")
    assert torch.allclose(D, file["D"], atol=1e-5)
    with safe_open(out, "pt") as opened:
        assert opened.metadata()["rewards"] == "toy.ocr,toy.clipscore,preference,detail"


def test_two_processes_estimate_exactly_what_one_does(curve, tmp_path):
    out = tmp_path / "two.safetensors"
    launch("estimate.py", *ESTIMATE, "--proposal", "self", "--estimator", "self", "--out", out,
           processes=2)
    assert torch.equal(load_file(out)["R"], load_file(curve[0])["R"])


def test_a_trained_policy_has_another_curve(run, curve, tmp_path):
    out = tmp_path / "trained.safetensors"
    flags = ("--proposal", "self", "--estimator", "self", "--out", out)
    launch("estimate.py", *ESTIMATE, *flags, "--lora", run[0] / (run[0] / "latest").read_text())
    assert not torch.equal(load_file(out)["R"], load_file(curve[0])["R"])


def test_a_rendered_proposal_decides_everything_by_the_clean_end(tmp_path):
    out = tmp_path / "render.safetensors"
    launch("estimate.py", *ESTIMATE, "--out", out)
    R = load_file(out)["R"]                                                            # (4,4,3,3,1)
    assert R[0, -1].mean() > 0.95 > R[0, 0].mean()   # perfect words are read; from noise less often


# ------------------------------------------------------------------ train.py

TRAIN = ("--prompts-per-epoch", 3, "--images-per-prompt", 3, "--micro-batch", 2, "--updates", 2,
         "--eval-prompts", 5, "--steps", 3, "--eval-steps", 3, "--epochs", 2, "--save-every", 1,
         "--levels", 2, "--judges", "toy.py:strict", "--lam", "2,1,1,1", "--kl-weight", 0.1)


@pytest.fixture(scope="session")
def run(curve, tmp_path_factory):
    """A run of two epochs in one process: nine images in chunks of two, and what it printed."""
    out = tmp_path_factory.mktemp("run") / "one"
    return out, launch("train.py", *TRAIN, "--curve", curve[0], "--out", out)


def weights(run, epoch=2):
    return load_file(run / f"checkpoint-{epoch:05d}" / "state.safetensors")


def rewards_of(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["reward"] for line in lines if "reward" in line]


def test_any_number_of_processes_trains_the_same_weights(run, curve, tmp_path):
    launch("train.py", *TRAIN, "--curve", curve[0], "--out", tmp_path / "many", processes=3)
    one, many = weights(run[0]), weights(tmp_path / "many")
    assert one.keys() == many.keys() and rewards_of(run[0]) == rewards_of(tmp_path / "many")
    for key, value in one.items():
        assert torch.allclose(value, many[key], atol=1e-6, rtol=1e-5), key


def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(run, curve, tmp_path):
    out = tmp_path / "halves"
    launch("train.py", *TRAIN, "--curve", curve[0], "--out", out, "--epochs", 1)
    launch("train.py", *TRAIN, "--curve", curve[0], "--out", out, "--resume")
    whole, halves = weights(run[0]), weights(out)
    assert all(torch.equal(value, halves[key]) for key, value in whole.items())


def test_the_saved_lora_acts_in_a_fresh_pipeline_as_the_ema_adapter(run):
    state = weights(run[0])
    pipe = evaluate.load_pipeline("toy", torch.float32, torch.device("cpu"))
    x, t = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0)), 0.5
    text = tuple(e[:2] for e in held_out()[2])
    with torch.no_grad():
        base = evaluate.velocity(pipe.transformer, x, t, text)
        # the oracle: W + alpha / rank * up @ down, written into a copy of the base by hand
        merged = copy.deepcopy(pipe.transformer)
        ema = iter(state[f"ema.{k}"] for k in range(sum(k.startswith("ema.") for k in state)))
        for name, module in merged.named_modules():
            if name.endswith(tuple(train.TARGETS)):
                down, up = next(ema), next(ema)
                module.weight += 32 / 16 * up @ down
        assert next(ema, None) is None
        wanted = evaluate.velocity(merged, x, t, text)
        pipe.load_lora_weights(run[0] / (run[0] / "latest").read_text())
        loaded = evaluate.velocity(pipe.transformer, x, t, text)
    assert torch.allclose(loaded, wanted, atol=1e-5)
    assert (loaded - base).abs().max() > 1e-4


def test_old_ema_and_new_adapters_follow_their_recurrences(run):
    before, after = weights(run[0], 1), weights(run[0], 2)
    for k in range(3):
        d = nft.old_policy_decay(4, 1)                       # two epochs of two updates
        assert torch.allclose(after[f"old.{k}"], d * before[f"old.{k}"]
                              + (1 - d) * after[f"default.{k}"], atol=1e-6)
    moved = [(after[f"default.{k}"] - after[f"ema.{k}"]).abs().max() for k in range(30)]
    assert max(moved) > 1e-4                                 # the average lags behind


def test_the_kl_term_and_the_weights_reach_the_update(run, curve, tmp_path):
    for name, change in {"kl": ("--kl-weight", 10), "static": ("--weights", "static"),
                         "seed": ("--seed", 1), "beta": ("--beta", 0.5)}.items():
        launch("train.py", *TRAIN, "--curve", curve[0], "--out", tmp_path / name, "--epochs", 2,
               *change)
        same = [torch.allclose(v, weights(tmp_path / name)[k], atol=1e-7)
                for k, v in weights(run[0]).items() if k.startswith("default")]
        assert not all(same), name


def test_a_resumed_run_must_be_the_same_run(run, curve, capsys):
    for change in (("--lora-alpha", 8), ("--lam", "1,1,1,1"), ("--seed", 5)):
        with pytest.raises(SystemExit):
            launch("train.py", *TRAIN, "--curve", curve[0], "--out", run[0], "--resume", *change)
        assert f"{change[0]} " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch("train.py", *TRAIN, "--curve", curve[0], "--out", run[0])
    assert "a run is there" in capsys.readouterr().err


def test_a_run_killed_between_checkpoints_does_its_epochs_once(run, curve, tmp_path):
    out = tmp_path / "killed"
    launch("train.py", *TRAIN, "--curve", curve[0], "--out", out, "--epochs", 1)
    shutil.copytree(out / "checkpoint-00001", out / "checkpoint-00002")   # renamed, `latest` not
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "eval": [0, 0, 0, 0]}\n')                 # an epoch it lost
    launch("train.py", *TRAIN, "--curve", curve[0], "--out", out, "--resume")
    epochs = [json.loads(x)["epoch"] for x in (out / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [0, 1, 2] and rewards_of(out)[:2] == rewards_of(run[0])[:2]
    assert all(torch.equal(v, weights(out)[k]) for k, v in weights(run[0]).items())


def test_a_reward_that_is_also_a_judge_counts_once(curve, tmp_path):
    flags = (*TRAIN, "--curve", curve[0], "--epochs", 1, "--judges", "toy.py:ocr,toy.py:strict")
    printed = launch("train.py", *flags, "--out", tmp_path / "run")
    assert printed.count("| toy.ocr |") == 1 and "| strict (judge) |" in printed


def test_a_run_folder_holds_what_the_readme_says(run):
    out, printed = run
    names = {f.name for f in out.iterdir()}
    assert {"args.json", "metrics.jsonl", "W.safetensors", "latest", "report.md", "plot.png",
            "base-and-trained.png", "grid-00000.png", "checkpoint-00002"} <= names
    W = load_file(out / "W.safetensors")["W"]
    assert torch.allclose(W.sum(1), torch.tensor([0.4, 0.2, 0.2, 0.2]).double())
    assert torch.allclose(W.sum(0), torch.full((3,), 1 / 3).double())
    assert "sum of rewards" in printed and "strict (judge)" in printed
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert {"reward", "dead_groups", "r_min", "grad_norm", "moved", "kl", "loss_by_step"} <= {*line}


def test_evaluate_scores_base_and_runs_at_equal_noise(run, tmp_path):
    out = tmp_path / "evaluation"
    launch("evaluate.py", run[0], "--eval-prompts", 5, "--out", out)
    results = json.loads((out / "results.json").read_text())
    trained = dict(re.findall(r"^\| (\S+) \| \S+ \| (\S+) \|", (run[0] / "report.md").read_text(),
                              re.M))
    for name, values in zip(results["rewards"], results["scores"][str(run[0])]):
        assert f"{sum(values) / 5:.3f}" == trained[name]
    assert (out / "grid.png").stat().st_size > 1000 and "| base |" in (out / "table.md").read_text()


def test_gradients_flow_to_the_trained_adapter_alone_after_sampling_and_evaluation():
    from peft import LoraConfig
    net = copy.deepcopy(pipeline().transformer)
    for name in ("default", "old", "ema"):
        net.add_adapter(LoraConfig(r=2, target_modules=train.TARGETS), name)
    wanted = {n for n, _ in net.named_parameters() if ".default." in n}
    for name in ("default", "old", None, "ema", "default"):
        evaluate.use(net, name)
        assert {n for n, p in net.named_parameters() if p.requires_grad} == wanted
    tensors = [train.adapter(net, name) for name in ("default", "old", "ema")]
    assert len(set(map(len, tensors))) == 1
    storages = [p.data_ptr() for group in tensors for p in group]
    assert len(set(storages)) == len(storages) == 3 * len(wanted)


BAD = [
    ("train.py", "--lam 1,1,1", "4 budgets"), ("train.py", "--lam 1,-1,1,1", "lam"),
    ("train.py", "--lam 0,0,0,0", "lam"), ("train.py", "--lam a,b", "lam"),
    ("train.py", "--epochs 0", "--epochs 0"), ("train.py", "--lr 0", "--lr 0"),
    ("train.py", "--steps 0", "--steps 0"), ("train.py", "--levels 11", "--levels 11"),
    ("train.py", "--beta 0", "--beta 0"), ("train.py", "--beta nan", "--beta nan"),
    ("train.py", "--adv-clip -1", "--adv-clip -1"), ("train.py", "--tau 0", "--tau 0"),
    ("train.py", "--images-per-prompt 1", "--images-per-prompt 1"),
    ("train.py", "--kl-weight -1", "--kl-weight -1"), ("train.py", "--decay 3", "--decay 3"),
    ("train.py", "--setting poem", "--setting"), ("train.py", "--weights best", "--weights"),
    ("train.py", "--std none", "--std"), ("train.py", "--rewards beauty", "beauty"),
    ("train.py", "--rewards none.py:f", "none.py"), ("train.py", "--judges beauty", "beauty"),
    ("train.py", "--prompts none.txt", "none.txt"), ("train.py", "--curve none.st", "none.st"),
    ("train.py", "--steps 12", "not 12 with"), ("train.py", "--model none", "none"),
    ("train.py", "--resume", "no checkpoint"), ("train.py", "--updates 9", "--updates 9"),
    ("train.py", "--prompts {here}/prompts/toy-train.txt", "cannot score"),
    ("train.py", "--size 128", "--size 128"), ("train.py", "--eval-list none.txt", "none.txt"),
    ("estimate.py", "--alpha 4", "--out"), ("estimate.py", "--P 5", "--out"),
    ("estimate.py", "--size 60 --out a.safetensors", "--size 60"),
    ("train.py", "--size 65", "--size 65"),
    ("estimate.py", "--alpha 1", "alpha"), ("estimate.py", "--alpha -2", "alpha"),
    ("estimate.py", "--P 0", "--P 0"), ("estimate.py", "--K 0", "--K 0"),
    ("estimate.py", "--proposal self --out a.safetensors", "self"),
    ("estimate.py", "--proposal none.py:f --out a.safetensors", "none.py"),
    ("estimate.py", "--out a.png", "a.png"),
    ("estimate.py", "--pool prompt --N 4", "16"),
    ("estimate.py", "--prompts none.txt --out a.safetensors", "none.txt"),
    ("estimate.py", "--estimator pair", "pair"), ("estimate.py", "--lora none", "none"),
    ("estimate.py", "--estimator pair --proposal self --alpha 4", "alpha"),
    ("evaluate.py", "none", "none"), ("evaluate.py", "a a", "once"),
    ("evaluate.py", "none --eval-prompts 1", "--eval-prompts 1"),
    ("sinkhorn.py", "none.safetensors --lam 1,1,1,1", "none.safetensors"),
    ("toy.py", "", "--build"),
]


@pytest.mark.parametrize("script, flags, culprit", BAD)
def test_a_bad_invocation_is_one_line_with_its_culprit_and_writes_nothing(
        script, flags, culprit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags.format(here=HERE).split()])
    with pytest.raises(SystemExit) as stopped:
        PROGRAMS[script].main()
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and culprit in error and len(error.splitlines()) == 1, error
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(["--dry-run", "--weights", "static"])
    printed = capsys.readouterr().out
    assert printed.startswith("model toy (no CUDA device") and "16 prompts x 12 images" in printed
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ the repository

LEAVES = ("sinkhorn", "renyi_gain", "nft_loss", "rewards")
SCRIPTS = (*LEAVES, "train", "estimate", "evaluate", "toy")


def test_every_test_that_a_comment_names_exists():
    tests = (HERE / "test_all.py").read_text()
    for script in SCRIPTS:
        for name in re.findall(r"Test: (test_\w+)", (HERE / f"{script}.py").read_text()):
            assert f"def {name}(" in tests, f"{script}: {name}"


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_copied_alone_into_an_empty_folder_imports(leaf, tmp_path):
    (tmp_path / f"{leaf}.py").write_bytes((HERE / f"{leaf}.py").read_bytes())
    command = f"import sys, {leaf}; print(sorted(set(map(lambda n: n.split('.')[0], sys.modules))))"
    printed = subprocess.check_output([sys.executable, "-c", command], cwd=tmp_path, text=True)
    assert not {"diffusers", "peft", "PIL", "matplotlib", "cv2"} & set(re.findall(r"\w+", printed))


def test_files_stay_within_their_limits_and_nothing_is_unpickled():
    lines = {s: (HERE / f"{s}.py").read_text().splitlines() for s in SCRIPTS}
    for script, text in lines.items():
        limit = {"rewards": 350, "toy": 500}.get(script, 260 if script in LEAVES else 450)
        assert len(text) <= limit, script
        assert not re.search(r"\bpickle\b|torch\.load\(|except:", "\n".join(text)), script
    assert sum(map(len, lines.values())) < 2600


def readme_code(word):
    """The README's code block that contains `word`."""
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    return next(block for block in blocks if word in block)


def test_the_readme_snippet_loads_the_trained_lora_with_diffusers_alone(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = readme_code("load_lora_weights").replace('"toy"', f'"{HERE / "toy"}"')
    exec(code.replace("runs/run/checkpoint-00020", str(run[0] / "checkpoint-00002")), {})
    assert Image.open("star.png").size == (64, 64)


def test_the_readme_reward_runs_beside_a_built_in_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my_file.py").write_text(readme_code("def darkness"))
    flags = "--rewards toy.py:ocr,my_file.py:darkness --lam 1,1 --weights static --dry-run"
    train.main(flags.split())
    assert "darkness  1.00" in capsys.readouterr().out


def test_readme_commands_name_flags_that_exist():
    readme = (HERE / "README.md").read_text()
    for script in ("train", "estimate", "evaluate", "sinkhorn", "toy"):
        source = (HERE / f"{script}.py").read_text()
        for command in re.findall(rf"(?:python|per_node=2) {script}\.py([^\n`#|&]*)", readme):
            for flag in re.findall(r"--([a-zA-Z][\w-]*)", command):
                assert f'"--{flag}"' in source or f'("{flag}"' in source, (script, flag)
