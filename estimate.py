"""Estimate the gain curve of every reward: at which noise level is what it prefers decided?

Paper: ReCAST (arXiv 2609.13425), section 3.3, appendix B.1; the statistics are renyi_gain.py's.
    (1) noise clean samples of a proposal pi+ to each level sigma_j; (2) roll the policy back to
    clean K times, score, mu_hat = mean over K; (3) log-moment, difference: gain (m, T)

    python estimate.py                                    # the shipped curve of the miniature
    torchrun --nproc_per_node=2 estimate.py --proposal self --out own.safetensors
    python estimate.py --show curves/toy-ocr.safetensors own.safetensors --out both.png

R (m, T+1, P, N, K) rewards: m rewards, T steps, P prompts, N states per prompt, K rollouts each.
Differences from the paper, as far as we know its text
 1. Rollouts take the ancestral step (renyi_gain.py): draws from p(x0 | x_t) as its steps shrink.
 2. Each path and each rollout keeps its noises at all levels, so that what neighbouring levels
    have in common cancels in their difference. K = 1 by default, unbiased at alpha = 2.
 3. The proposal is a function, a folder of pictures, the policy with guidance ("cfg") or the policy
    itself ("self"); then the states are those of its own path, which makes "pair" exact.
 4. Errors by bootstrap over prompts; noisy profiles are shrunk; --show rereads the kept rollouts.
"""

import argparse
import os
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from evaluate import (
    HERE, SETTINGS, choose_model, chunks, decode, encode_prompts, generator, latent_shape,
    load_lora, load_pipeline, noise_levels, normal, processes, sample, stop, summed, velocity)
from renyi_gain import ancestral_step, bootstrap, renyi_divergence, shrink
from rewards import load_function, load_prompts, load_rewards, score
from sinkhorn import sinkhorn

GUIDANCE, CFG_STEPS, BEST_OF = 4.5, 40, 4             # --proposal cfg


def read_folder(folder, prompts, N, size):
    """Pictures of FOLDER/prompts.jsonl, lines {"prompt", "file"}: (N*P,3,H,W), prompts fastest.
    ValueError: a file that is not a plain name in FOLDER, a prompt with fewer than N files."""
    from PIL import Image
    files, listed = {}, Path(folder) / "prompts.jsonl"
    for prompt, line in zip(*load_prompts(listed), strict=True):
        if not isinstance(line.get("file"), str) or Path(line["file"]).name != line["file"]:
            raise ValueError(f'{listed}: "file" {line.get("file")!r} must be a plain file name')
        files.setdefault(prompt, []).append(Path(folder) / line["file"])
    images = []
    for n, prompt in ((n, prompt) for n in range(N) for prompt in prompts):
        if len(files.get(prompt, [])) < N:
            raise ValueError(f"{listed}: needs {N} files for prompt {prompt!r}")
        with Image.open(files[prompt][n]) as picture:
            small = picture.convert("RGB").resize((size, size), Image.LANCZOS)
        images.append(torch.from_numpy(np.array(small)).permute(2, 0, 1) / 255.0)
    return torch.stack(images)


def encode(pipe, images):
    """Latents (B,C,h,w) of images (B,3,H,W) in [0, 1]: mean of the autoencoder, shifted, scaled."""
    mean = pipe.vae.encode(images.to(pipe.vae.device) * 2 - 1).latent_dist.mean
    return (mean - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor


def roll(v, x, sigmas, start, noise):
    """Ancestral steps by v(x, t) from level index start to data; noise (T, B, ...) by step index.
    Returns every state from start on, the clean one last, and x0_hat at each but that."""
    path, x0_hat = [x], []
    for t, s, z in zip(sigmas[start:-1].tolist(), sigmas[start + 1:].tolist(), noise[start:]):
        v_t = v(path[-1], t)
        x0_hat.append(path[-1] - t * v_t)
        path.append(ancestral_step(path[-1], v_t, t, s, z))
    return path, x0_hat


def read(spec, args):
    """A dict from a curve file, given as FILE, FILE=ALPHA or FILE=ESTIMATOR: D, gain, the W of
    --lam, the errors of all three. A reward whose total is within two errors of 0 has no curve: a
    row of NaN, a constant kernel row for W. ValueError: no curve file, or renyi_gain.py's."""
    file, _, how = (spec, "", "") if Path(spec).is_file() else spec.rpartition("=")
    try:
        with safe_open(file, "pt") as opened:
            about, data = opened.metadata() or {}, {k: opened.get_tensor(k) for k in opened.keys()}
        names, number = about["rewards"].split(","), re.fullmatch(r"[\d.]+", how)
        R, sigmas, own, probe = data["R"], data["sigmas"], data.get("own"), data.get("probe")
        kind, estimator = about["estimator"], how if how and not number else about["estimator"]
        if (R.shape[:2] != (len(names), len(sigmas)) or estimator == "self" != kind
                or (estimator == "positive") != (kind == "positive")):
            raise ValueError(f"R {tuple(R.shape)}, of {kind!r}: no {estimator!r} in it")
        R, probe = (R, probe) if estimator != "probe" or probe is None else (probe[..., None], None)
        how = float(how if number else about["alpha"]), estimator, about["pool"], own, probe
        D, draws = renyi_divergence(R, *how), bootstrap(R, *how)          # (m,T+1), (200,m,T+1)
        stderr_D, stderr = draws.std(0), draws.diff(dim=-1).std(0)
        gains = torch.cat([D[None], draws]).diff(dim=-1)                  # (201,m,T)
        gains[:, D[:, -1] <= 2 * stderr_D[:, -1]] = torch.nan
        gains = torch.stack([shrink(g, stderr * args.shrink) for g in gains])
        gains[~gains.isfinite().all(-1)] = torch.nan
        with warnings.catch_warnings(action="ignore"):                    # draws without a total
            W = torch.stack([sinkhorn(g, args.lam or [1.0] * len(names))[0] for g in gains])
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{spec}: expected a curve file of estimate.py: {error}") from None
    raw, W = D.diff(dim=-1), (W / W.mean(2, keepdim=True)).nan_to_num()    # W over static weights
    clear = (raw - raw.mean(1, keepdim=True)).norm(dim=1) / stderr.norm(dim=1)
    return {"names": names, "sigmas": sigmas, "D": D, "stderr_D": stderr_D, "gain": gains[0],
            "raw": raw, "stderr": stderr, "clear": clear.where(gains[0].isfinite().all(1), 0.0),
            "W": W[0], "stderr_W": W[1:].std(0) + 0 * stderr.sum()}


def report(curves):
    """Totals, how far each profile stands out of its error, W; and which curve does so most."""
    for label, c in curves.items():
        print(label)
        for i, name in enumerate(c["names"]):
            j = c["gain"][i].argmax()                          # the first if all are NaN
            print(f"{name:>16}  total {c['D'][i, -1]:.4f} +- {c['stderr_D'][i, -1]:.4f} nats, " + (
                "no usable curve, no step preferred; more --budget?" if c["gain"][i, j].isnan() else
                f"most at sigma {c['sigmas'][j]:.2f}-{c['sigmas'][j + 1]:.2f}, profile / its error "
                f"{c['clear'][i]:.1f}, W {c['W'][i].min():.2f}-{c['W'][i].max():.2f} of static"))
    if len(curves) > 1 and all(x["names"] == c["names"] for x in curves.values()):
        for name, *values in zip(c["names"], *(x["clear"].tolist() for x in curves.values())):
            best = list(curves)[values.index(max(values))] if max(values) > 0 else "none"
            print(f"{name:>16}  the error bars (not the bias) favour {best}")


def plot_curves(path, curves):
    """PNG, a column per curve: gains and D with bands of one error, and W over static weights."""
    from io import BytesIO
    from matplotlib.figure import Figure
    from PIL import Image
    T = len(next(iter(curves.values()))["sigmas"])
    figure = Figure(figsize=((2 + 0.45 * T) * len(curves), 8), layout="constrained")
    for (top, middle, bottom), (label, c) in zip(
            figure.subplots(3, len(curves), squeeze=False).T, curves.items()):
        where, levels = torch.arange(len(c["sigmas"])), [f"{s:.3f}" for s in c["sigmas"].tolist()]
        for i, (name, total) in enumerate(zip(c["names"], c["D"][:, -1].tolist())):
            usable = bool(c["gain"][i].isfinite().all())       # else nothing to normalise by
            for axis, x, y, e, unit in (
                    (top, where[1:] - 0.5, c["raw"][i], c["stderr"][i], total / len(where[1:])),
                    (middle, where, c["D"][i], c["stderr_D"][i], total)):
                x, y, e = (z[:len(z) * usable] for z in (x, y / unit, e / unit))
                axis.plot(x, y, "o-", ms=3, label=f"{name}: {total:.4f}" + " (flat)" * (not usable))
                axis.fill_between(x, y - e, y + e, alpha=0.2)
        top.axhline(1, color="grey", lw=0.5)
        top.legend(title="reward: total gain, nats", fontsize=7)
        top.set(title=label, ylabel="gain of a step / mean gain")
        bottom.imshow(c["W"], aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
        for (i, j), w in np.ndenumerate(c["W"].numpy()):
            bottom.text(j, i, f"{w:.2f}\n\u00b1{c['stderr_W'][i, j]:.2f}", fontsize=6, ha="center",
                        va="center", color="k" if abs(w - 1) < 0.6 else "w")
        bottom.set_yticks(range(len(c["names"])), c["names"], fontsize=7)
        bottom.set(title="W / static weight, 1 standard error", xlabel="noise  <-  sigma  ->  data")
        middle.set(ylabel="D / total")
        for axis, ticks in ((top, where), (middle, where), (bottom, where - 0.5)):
            axis.set_xticks(ticks, levels, fontsize=6)
            axis.set_xlim(ticks[0] - 0.1, ticks[-1] + 0.1)
            axis.title.set_fontsize(9)
    figure.savefig(drawn := BytesIO(), dpi=80)
    Image.open(drawn).convert("RGB").quantize().save(f"{path}.part", "PNG")         # half the bytes
    os.replace(f"{path}.part", path)


def load_curve(args, names, sigmas):
    """gain (m, T) of --curve, rows in the order of names (NaN: not in it), for these sigmas."""
    try:
        with safe_open(args.curve, "pt") as file:
            known = (file.metadata() or {}).get("rewards", "").split(",")
            gain, levels = file.get_tensor("gain").double(), file.get_tensor("sigmas").float()
        if levels.shape != sigmas.shape or not torch.allclose(levels, sigmas, atol=1e-4):
            raise ValueError(f"it is for {len(levels) - 1} steps, sigmas {levels[1:3].tolist()}.., "
                             f"not {len(sigmas) - 1}, {sigmas[1:3].tolist()}...")
        if gain.shape != (len(known), len(sigmas) - 1) or not set(known) & set(names):
            raise ValueError(f"it has the rewards {known}, none of {names}")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"--curve {args.curve}: {error}; `python estimate.py --model {args.model} --steps "
            f"{args.steps} --rewards {args.rewards} --out FILE` or --weights static") from None
    return torch.stack([gain[known.index(n)] if n in known else gain[0] * torch.nan for n in names])


def parse(argv):
    """Arguments, checked; the defaults make the shipped curve of the model and setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error, add = lambda error: stop("estimate.py", error), parser.add_argument
    add("--setting", default="ocr", choices=["ocr", "geneval"], help="which rewards and prompts")
    add("--model", help="diffusers SD3 folder or hub name")
    add("--lora", help="LoRA folder of train.py: curves of a trained policy")
    add("--rewards", help="comma list of built-in names and file.py:function")
    add("--prompts", help="prompt list, .txt or .jsonl")
    add("--proposal", help="pi+: file.py:function(prompts, metadata, seed) -> images, a folder, "
        f"cfg (guidance {GUIDANCE}, {CFG_STEPS} steps, best 1 in {BEST_OF}), self (the policy)")
    add("--estimator", choices=["positive", "self", "pair", "probe"], help="positive: a proposal; "
        "the policy: self (plug-in), pair (unbiased, default), probe (a bound, no rollouts)")
    add("--pool", default="all", choices=["all", "prompt"], help="one log, or one per prompt")
    add("--alpha", type=float, default=2.0, help="Renyi order, > 0 and not 1")
    add("--P", type=int, default=256, help="prompts, at least 1")
    add("--N", type=int, default=4, help="noisy states per prompt and level, at least 1")
    add("--M", type=int, default=0, help="states per prompt for pair's control variate, 0: none")
    add("--K", type=int, default=1, help="rollouts per state, at least 1")
    add("--budget", type=int, help="velocity calls, instead of --P: prompts first, then states")
    add("--steps", type=int, default=10, help="denoising steps T, 1 to 1000")
    add("--size", type=int, help="height and width in pixels")
    add("--text-tokens", type=int, help="T5 tokens")
    add("--t5", type=int, default=1, choices=[0, 1], help="0: zeros for the third text encoder")
    add("--micro-batch", type=int, default=32, help="states in one forward pass, at least 1")
    add("--dtype", choices=["float32", "bfloat16"], help="dtype of the transformer")
    add("--shrink", type=int, default=1, choices=[0, 1], help="1: draw noisy profiles toward flat")
    add("--lam", type=lambda text: [float(x) for x in text.split(",")], help="budgets of W here")
    add("--show", nargs="+", metavar="FILE[=ALPHA|=ESTIMATOR]", help="only draw these curve files")
    add("--seed", type=int, default=0, help="seed")
    add("--out", help=".safetensors file to write, a .png goes beside it; with --show the .png")
    args = parser.parse_args(argv)
    if args.show:
        if not (args.out or "").endswith(".png"):
            parser.error(f"--out {args.out}: expected a .png file with --show")
        return args, parser.error
    given = dict(vars(args))
    key, args.why = choose_model(args, parser.error)
    args.estimator = args.estimator or ("pair" if args.proposal == "self" else "positive")
    pair = args.estimator in ("pair", "probe")
    for name, bad, right in (
            *((name, not 1 <= vars(args)[name] <= 10**6, "at least 1")
              for name in ("P", "N", "K", "steps", "micro_batch")),
            ("alpha", not 0 < args.alpha < 100 or args.alpha == 1 or pair and args.alpha != 2,
             "above 0, below 100, not 1; 2 for pair and probe"),
            ("N", args.N < 16 and args.pool == "prompt" or args.N < 2 and pair,
             "at least 16 for --pool prompt, 2 for pair and probe"),
            ("M", args.M and (args.estimator != "pair" or args.M < args.N), "0, or with pair >= N"),
            ("lora", args.lora and not Path(args.lora).is_dir(), "a checkpoint folder of train.py"),
            ("seed", args.seed < 0, "at least 0"),
            ("text_tokens", not 0 <= args.text_tokens <= 512, "0 to 512"),
            ("estimator", (args.proposal == "self") == (args.estimator == "positive"),
             "self, pair or probe with --proposal self, positive with any other")):
        if bad:
            parser.error(f"--{name.replace('_', '-')} {vars(args)[name]}: expected {right}")
    own = [k for k, v in given.items() if v != parser.get_default(k)
           and k not in ("out", "model", "setting", "micro_batch", "dtype", "lam")]
    if own and not args.out:
        parser.error(f"--out: needed with --{own[0]}, so that no other curve is overwritten")
    rewards, _, stem = SETTINGS[key][args.setting]
    args.rewards = args.rewards or rewards
    args.prompts = args.prompts or str(HERE / f"prompts/{stem}-train.jsonl")
    args.out = Path(args.out or HERE / f"curves/{Path(args.model).name}-{args.setting}.safetensors")
    if args.out.suffix != ".safetensors":
        parser.error(f"--out {args.out}: expected a .safetensors file")
    return args, parser.error


def calls(args, P, N, M):
    """Velocity calls: the proposal's or the own path's; the rollouts', for pair not of level 0."""
    first = {"self": max(N, M) * args.steps, "cfg": N * 2 * CFG_STEPS}.get(args.proposal, 0)
    rolled = N * args.K * args.steps * (args.steps + 1 - 2 * (args.estimator == "pair")) // 2
    return P * (first + rolled * (args.estimator != "probe"))


@torch.no_grad()
def main(argv=None):
    """Sample or read the proposal, roll out, score, reduce, write the curve and its picture."""
    # ------------------------------------------------------------ SETUP
    args, fail = parse(argv)
    if args.show:
        try:
            curves = {spec: read(spec, args) for spec in args.show}
            plot_curves(args.out, curves)
        except (ValueError, OSError) as error:
            fail(error)
        return report(curves)
    rank, world, device = processes()
    say = print if rank == 0 else lambda *a, **k: None
    say(args.why)
    try:
        rewards = load_rewards(args.rewards, device)
        m, T = len(rewards), args.steps
        args.lam = args.lam or [1.0] * m
        sinkhorn(torch.ones(m, T), args.lam)                              # is --lam right?
        prompts, metadata = load_prompts(args.prompts, rewards.values())
        P, N, M = min(args.P, len(prompts)), args.N, args.M
        if args.budget is not None:
            P = min(len(prompts), args.budget // calls(args, 1, N, M))
            if P < 1:
                raise ValueError(f"--budget {args.budget}: expected {calls(args, 1, N, M)} or more")
            N, M = (n * (args.budget // calls(args, P, N, M)) for n in (N, M))
        pick = torch.randperm(len(prompts), generator=generator(args.seed, "prompts"))[:P]
        prompts, metadata = [prompts[k] for k in pick], [metadata[k] for k in pick]
        pipe = load_pipeline(args.model, getattr(torch, args.dtype), args.offline, args.t5)
        shape = latent_shape(pipe, args.size)                             # (C,h,w)
        sigmas = noise_levels(pipe, T)                                    # (T+1,)
        if args.lora:
            load_lora(pipe, args.lora)
        text, empty = encode_prompts(pipe, [prompts, [""]], args.text_tokens, device)
        images = None                                                     # drawn below
        if Path(args.proposal).is_dir():
            images = read_folder(args.proposal, prompts, N, args.size)
        elif args.proposal not in ("self", "cfg"):
            images = load_function(args.proposal)(prompts * N, metadata * N, args.seed)
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except KeyError as error:
        fail(f"--proposal {args.proposal}: needs {error} in the lines of {args.prompts}")
    except (ValueError, OSError, SafetensorError) as error:
        fail(error)
    announced, made, S = calls(args, P, N, M), 0, P * max(N, M)         # S states, prompts fastest
    say(f"{args.proposal}, {args.estimator}: {P} prompts x {N} states x {T} levels x {args.K} "
        f"rollouts: {announced:,} velocity calls, over {world} processes")
    parts = chunks(P * N, args.micro_batch) + [
        [P * N + i for i in c] for c in chunks(S - P * N, args.micro_batch)]

    def judge(x0, index):                                                 # (m,b)
        return score(rewards, decode(pipe, x0.to(device)), [prompts[i % P] for i in index],
                     [metadata[i % P] for i in index])

    # ------------------------------------------------------------ PROPOSAL BY GUIDANCE
    if args.proposal == "cfg":
        x0, scores = torch.zeros(P * N, *shape), torch.zeros(m, P * N, dtype=torch.float64)
        for index in tqdm(parts[rank::world], "proposal", disable=rank > 0 or None):
            noise = normal(shape, args.seed, "proposal", index=index).to(device)
            words = tuple(e[[i % P for i in index]] for e in text)
            drawn = sample(pipe, words, noise_levels(pipe, CFG_STEPS), noise, GUIDANCE, empty)
            x0[index], scores[:, index] = drawn.cpu(), judge(drawn, index)
            made += 2 * CFG_STEPS * len(index)
        scores = summed(scores, device)
        total = (scores / scores.std(1, keepdim=True)).nan_to_num(posinf=0.0).sum(0).view(N, P)
        best = total.topk(max(1, N // BEST_OF), 0).indices.repeat(N, 1)[:N]   # each several times
        x0 = summed(x0, device)[(best * P + torch.arange(P)).flatten()]

    # ------------------------------------------------------------ NOISE, ROLL OUT, SCORE
    R = torch.zeros(m, T + 1, P * N, args.K, dtype=torch.float64)
    own, probe = torch.zeros(m, S, dtype=torch.float64), torch.zeros(m, T + 1, S).double()
    for index in tqdm(parts[rank::world], "states", disable=rank > 0 or None):
        words = tuple(e[[i % P for i in index]] for e in text)

        def policy(x, t, words=words):
            return velocity(pipe.transformer, x, t, words)

        noise = normal(shape, args.seed, "state", index=index).to(device)           # (b,C,h,w)
        z = [normal((T, *shape), args.seed, "steps", k, index=index).transpose(0, 1).to(device)
             for k in range(args.K + (args.proposal == "self"))]          # (T,b,C,h,w) each
        if args.proposal == "self":                   # states of its own path
            path, x0_hat = roll(policy, noise, sigmas, 0, z[args.K])
            made += T * len(index)
            own[:, index] = judge(path[-1], index)
            for j in range(T if M or args.estimator == "probe" else 0):
                probe[:, j, index] = judge(x0_hat[j], index)
        else:  # the same sampler, told x0: each state has the law of noised(x0), and differs from
            # what rollout k = 0 makes of the state before it only by x0_hat for x0
            clean = encode(pipe, images[index]) if images is not None else x0[index].to(device)
            path, _ = roll(lambda x, t, x0=clean: (x - x0) / t, noise, sigmas, 0, z[0])
        probe[:, T, index] = judge(path[-1], index)   # again: a judge may have its own randomness
        if args.estimator != "probe" and index[0] < P * N:
            for j, k in ((j, k) for j in range(args.estimator == "pair", T) for k in range(args.K)):
                R[:, j, index, k] = judge(roll(policy, path[j], sigmas, j, z[k])[0][-1], index)
                made += (T - j) * len(index)
    R, own, probe = (summed(x, device) for x in (R, own, probe))
    made = int(summed(torch.tensor([made], dtype=torch.float64), device))
    if made != announced:
        raise RuntimeError(f"{made} velocity calls ran, {announced} were announced")

    # ------------------------------------------------------------ CURVE
    if rank > 0:
        return
    own, probe = own.view(m, -1, P).mT, probe.view(m, T + 1, -1, P).mT   # (m,P,M), (m,T+1,P,M)
    R[:, T] = probe[:, T, :, :N].mT.flatten(1)[..., None]
    R = R.view(m, T + 1, N, P, -1).transpose(2, 3)                        # (m,T+1,P,N,K)
    data = {"R": probe[..., None] if args.estimator == "probe" else R, "sigmas": sigmas}
    data |= {"own": own} if args.proposal == "self" else {}
    data |= {"probe": probe} if M else {}
    about = {k: str(v) for k, v in vars(args).items() if k not in ("out", "why", "show")}
    about |= {"rewards": ",".join(rewards), "spec": args.rewards, "P": str(P), "N": str(N),
              "M": str(M), "prompts": Path(args.prompts).name, "sampler": "ancestral, guidance 1"}
    part, data = args.out.with_suffix(".part"), {k: v.float().contiguous() for k, v in data.items()}
    save_file(data, part, about)                      # it stays if no curve can be read from it
    try:
        curves = {e: read(f"{part}={e}", args)
                  for e in (args.estimator, *(["probe"] if M else ()))}
    except ValueError as error:
        fail(error)
    data |= {k: curves[args.estimator][k] for k in ("gain", "stderr", "D", "stderr_D")}
    save_file(data, part, about)
    os.replace(part, args.out)
    title = (f"{Path(args.model).name} {args.setting}, {args.proposal}, {args.estimator}, alpha "
             f"{args.alpha:g}, P {P} N {N} K {args.K}, seed {args.seed}")
    plot_curves(args.out.with_suffix(".png"), {title: curves[args.estimator]})
    report(curves)
    say(f"wrote {args.out} and its .png")


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    main()
