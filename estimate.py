"""Estimate the gain curve of every reward: at which noise level is what it prefers decided?

Paper: ReCAST (arXiv 2609.13425), section 3.3, appendix B.1; the statistics are renyi_gain.py's.
    (1) noise clean samples of a proposal pi+ to each level sigma_j; (2) roll the policy back to
    clean K times, score, mu_hat = mean over K; (3) log-moment, difference: gain (m, T)

    python estimate.py                                    # the shipped curve of the miniature
    torchrun --nproc_per_node=2 estimate.py --proposal self --estimator pair --out own.safetensors
    python sinkhorn.py curves/toy-ocr.safetensors --lam 1,1,1,1

R (m, T+1, P, N, K) rewards: m rewards, T steps, P prompts, N states per prompt, K rollouts each.
Differences from the paper, as far as we know its text
 1. Rollouts take the ancestral step (renyi_gain.py), which draws from p(x0 | x_t); an ODE does not.
 2. A state keeps its noise at every level, and so do its rollouts: the noise of neighbouring levels
    is common and cancels in the difference. K = 1 by default, unbiased at alpha = 2.
 3. The proposal is a function, a folder of pictures or the policy itself ("self"); in the last case
    the states are those of the sample's own path, which makes "pair" exact for this sampler.
 4. Bootstrap standard errors over prompts; R is kept in the file, so any alpha can be read from it.
"""

import argparse
import os
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from evaluate import (
    HERE, SETTINGS, choose_model, chunks, decode, encode_prompts, generator, latent_shape,
    load_lora, load_pipeline, noise_levels, normal, processes, stop, summed, velocity)
from renyi_gain import ancestral_step, bootstrap_stderr, monotone, noised, renyi_divergence
from rewards import load_function, load_prompts, load_rewards, score


def read_folder(folder, prompts, N, size):
    """Pictures of FOLDER/prompts.jsonl, lines {"prompt", "file"}: N per prompt, (P*N,3,H,W).
    ValueError: a file that is not a plain name in FOLDER, a prompt with fewer than N files."""
    import numpy as np
    from PIL import Image
    files, listed = {}, Path(folder) / "prompts.jsonl"
    for prompt, line in zip(*load_prompts(listed), strict=True):
        if not isinstance(line.get("file"), str) or Path(line["file"]).name != line["file"]:
            raise ValueError(f'{listed}: "file" {line.get("file")!r} must be a plain file name')
        files.setdefault(prompt, []).append(Path(folder) / line["file"])
    images = []
    for prompt in prompts:
        if len(files.get(prompt, [])) < N:
            raise ValueError(f"{listed}: needs {N} files for prompt {prompt!r}")
        for file in files[prompt][:N]:
            with Image.open(file) as picture:
                small = picture.convert("RGB").resize((size, size), Image.LANCZOS)
            images.append(torch.from_numpy(np.array(small)).permute(2, 0, 1) / 255.0)
    return torch.stack(images)


@torch.no_grad()
def encode(pipe, images):
    """Latents (B,C,h,w) of images (B,3,H,W) in [0, 1]: mean of the autoencoder, shifted, scaled."""
    mean = pipe.vae.encode(images.to(pipe.vae.device) * 2 - 1).latent_dist.mean
    return (mean - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor


@torch.no_grad()
def roll(pipe, x, text, sigmas, start, noise):
    """Ancestral steps from level index start to data; noise (T, B, ...) by step index.
    Returns every state from start on, the clean one last."""
    path = [x]
    for j in range(start, len(sigmas) - 1):
        t, s = sigmas[j].item(), sigmas[j + 1].item()
        path.append(ancestral_step(path[-1], velocity(pipe.transformer, path[-1], t, text), t, s,
                                   noise[j]))
    return path


def plot_curves(path, names, sigmas, gain, stderr, D, stderr_D, title):
    """PNG: gains with bands above, D below, both against the noise level, noise at the left."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    where, levels = torch.arange(len(sigmas)), [f"{s:.3f}" for s in sigmas.tolist()]
    for i, name in enumerate(names):
        mean = gain[i].mean()
        if mean <= 0:                                 # nothing to normalise by
            continue
        y, e = gain[i] / mean, stderr[i] / mean
        line, = top.plot(where[1:] - 0.5, y, "o-", ms=3, label=f"{name}: {D[i, -1]:.3f} nats")
        top.fill_between(where[1:] - 0.5, y - e, y + e, alpha=0.2, color=line.get_color())
        y, e = D[i] / D[i, -1], stderr_D[i] / D[i, -1]
        bottom.plot(where, y, "o-", ms=3, color=line.get_color())
        bottom.fill_between(where, y - e, y + e, alpha=0.2, color=line.get_color())
    top.axhline(1, color="grey", lw=0.5)
    top.set(ylabel="gain of a step / mean gain", title=title)
    top.legend(title="reward: total gain", fontsize=8)
    bottom.set(ylabel="D / total", xlabel="noise  <-  sigma  ->  data")
    bottom.set_xticks(where, levels, fontsize=8)
    figure.savefig(f"{path}.part", format="png", dpi=90)
    os.replace(f"{path}.part", path)


def load_curve(args, names, sigmas):
    """gain (m, T) of --curve, rows in the order of names (NaN: not in it), for these sigmas."""
    try:
        with safe_open(args.curve, "pt") as file:
            known = (file.metadata() or {}).get("rewards", "").split(",")
            gain, levels = file.get_tensor("gain").double(), file.get_tensor("sigmas").float()
        if levels.shape != sigmas.shape or not torch.allclose(levels, sigmas, atol=1e-4):
            raise ValueError(f"it is for {len(levels) - 1} steps, sigmas {levels[1:3].tolist()}...,"
                             f" not {len(sigmas) - 1}, {sigmas[1:3].tolist()}...")
        if gain.shape != (len(known), len(sigmas) - 1) or not set(known) & set(names):
            raise ValueError(f"it has the rewards {known}, none of {names}")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"--curve {args.curve}: {error}; make one with `python estimate.py --model {args.model}"
            f" --setting {args.setting} --steps {args.steps} --rewards {args.rewards} --out FILE` "
            "or use --weights static") from None
    flat = torch.full_like(gain[0], torch.nan)
    return torch.stack([gain[known.index(n)] if n in known else flat for n in names])


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
    add("--proposal", help="pi+: file.py:function(prompts, metadata, seed) -> images, a folder, or "
        "self (default: the model's, toy.py:render for the miniature)")
    add("--estimator", choices=["positive", "self", "pair"], help="states of a proposal, or of the "
        "policy: plug-in, unbiased pair (default: pair with --proposal self, else positive)")
    add("--pool", default="all", choices=["all", "prompt"], help="one log, or one per prompt")
    add("--alpha", type=float, default=2.0, help="Renyi order, > 0 and not 1")
    add("--P", type=int, default=64, help="prompts, at least 1")
    add("--N", type=int, default=16, help="noisy states per prompt and level, at least 1")
    add("--K", type=int, default=1, help="rollouts per state, at least 1")
    add("--steps", type=int, default=10, help="denoising steps T, 1 to 1000")
    add("--size", type=int, help="height and width in pixels")
    add("--text-tokens", type=int, help="T5 tokens")
    add("--t5", type=int, default=1, choices=[0, 1], help="0: zeros for the third text encoder")
    add("--micro-batch", type=int, default=32, help="states in one forward pass, at least 1")
    add("--dtype", choices=["float32", "bfloat16"], help="dtype of the transformer")
    add("--monotone", action="store_true", help="project D so that no gain is negative")
    add("--seed", type=int, default=0, help="seed")
    add("--out", help="curve file to write, .safetensors; a .png goes beside it")
    args = parser.parse_args(argv)
    given = dict(vars(args))
    key, args.why = choose_model(args, parser.error)
    args.estimator = args.estimator or ("pair" if args.proposal == "self" else "positive")
    pair, numbers = args.estimator == "pair", ("P", "N", "K", "steps", "micro_batch")
    for name, bad, right in (
            *((name, not 1 <= vars(args)[name] <= 10**6, "at least 1") for name in numbers),
            ("alpha", not 0 < args.alpha < 100 or args.alpha == 1 or pair and args.alpha != 2,
             "above 0, below 100, not 1; 2 for pair"),
            ("N", args.N < 16 and args.pool == "prompt" or args.N < 2 and pair,
             "at least 16 for --pool prompt, 2 for pair"),
            ("lora", args.lora and not Path(args.lora).is_dir(), "a checkpoint folder of train.py"),
            ("seed", args.seed < 0, "at least 0"),
            ("text_tokens", not 0 <= args.text_tokens <= 512, "0 to 512"),
            ("estimator", (args.proposal == "self") == (args.estimator == "positive"),
             "self or pair with --proposal self, positive with any other")):
        if bad:
            parser.error(f"--{name.replace('_', '-')} {vars(args)[name]}: expected {right}")
    own = [k for k, v in given.items() if v != parser.get_default(k)
           and k not in ("out", "model", "setting", "micro_batch", "dtype")]
    if own and not args.out:
        parser.error(f"--out: needed with --{own[0]}, so that no other curve is overwritten")
    rewards, _, stem = SETTINGS[key][args.setting]
    args.rewards = args.rewards or rewards
    args.prompts = args.prompts or str(HERE / f"prompts/{stem}-train.jsonl")
    args.out = Path(args.out or HERE / f"curves/{Path(args.model).name}-{args.setting}.safetensors")
    if args.out.suffix != ".safetensors":
        parser.error(f"--out {args.out}: expected a .safetensors file")
    return args, parser.error


def main(argv=None):
    """Sample or read the proposal, roll out, score, reduce, write the curve and its picture."""
    # ------------------------------------------------------------ SETUP
    args, fail = parse(argv)
    rank, world, device = processes()
    say = print if rank == 0 else lambda *a, **k: None
    say(args.why)
    try:
        rewards = load_rewards(args.rewards, device)
        prompts, metadata = load_prompts(args.prompts, rewards.values())
        pick = torch.randperm(len(prompts), generator=generator(args.seed, "prompts"))[:args.P]
        prompts, metadata = [prompts[k] for k in pick], [metadata[k] for k in pick]
        pipe = load_pipeline(args.model, getattr(torch, args.dtype), args.offline, args.t5)
        shape = latent_shape(pipe, args.size)                             # (C,h,w)
        sigmas = noise_levels(pipe, args.steps)                           # (T+1,)
        if args.lora:
            load_lora(pipe, args.lora)
        text, = encode_prompts(pipe, [prompts], args.text_tokens, device)
        P, N, K, T, m = len(prompts), args.N, args.K, args.steps, len(rewards)
        owner = torch.arange(P).repeat_interleave(N)                      # (P*N,) prompt of a state
        images = None                                                     # "self" draws its own
        if Path(args.proposal).is_dir():
            images = read_folder(args.proposal, prompts, N, args.size)
        elif args.proposal != "self":
            images = load_function(args.proposal)(
                [prompts[k] for k in owner], [metadata[k] for k in owner], args.seed)
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except KeyError as error:
        fail(f"--proposal {args.proposal}: needs {error} in the lines of {args.prompts}")
    except (ValueError, OSError, SafetensorError) as error:
        fail(error)
    calls = P * N * (K * T * (T + 1) // 2 + (T if images is None else 0))
    say(f"{P} prompts x {N} states x {T} levels x {K} rollouts: {calls:,} velocity calls, "
        f"{P * N * (K * T + 1):,} images to score, over {world} processes")

    # ------------------------------------------------------------ NOISE, ROLL OUT, SCORE
    R = torch.zeros(m, T + 1, P * N, K, dtype=torch.float64)
    made = 0                                                              # velocity calls
    for index in tqdm(chunks(P * N, args.micro_batch)[rank::world], "states",
                      disable=rank > 0 or None):
        own = owner[index]                                                # (b,)
        words = tuple(e[own] for e in text)

        def judge(x0, own=own):                                           # (m,b)
            return score(rewards, decode(pipe, x0), [prompts[k] for k in own],
                         [metadata[k] for k in own])

        noise = normal(shape, args.seed, "state", index=index).to(device)           # (b,C,h,w)
        steps = [normal((T, *shape), args.seed, "steps", k, index=index).transpose(0, 1).to(device)
                 for k in range(K + 1)]                                   # (T,b,C,h,w) each
        if images is None:                                                # states of the own path
            path = roll(pipe, noise, words, sigmas, 0, steps[K])
            made += T * len(index)
        else:
            x0 = encode(pipe, images[index])
            path = [noised(x0, s, noise) for s in sigmas.tolist()]
        R[:, T, index] = judge(path[-1])[..., None]                       # the sample's own reward
        for j in range(T):
            for k in range(K):
                R[:, j, index, k] = judge(roll(pipe, path[j], words, sigmas, j, steps[k])[-1])
                made += (T - j) * len(index)
    R = summed(R, device).view(m, T + 1, P, N, K)
    made = int(summed(torch.tensor([made], dtype=torch.float64), device))
    if made != calls:
        raise RuntimeError(f"{made} velocity calls ran, {calls} were announced")

    # ------------------------------------------------------------ CURVE
    if rank == 0:
        about = {k: str(v) for k, v in vars(args).items() if k not in ("out", "why", "rewards")}
        about |= {"rewards": ",".join(rewards), "P": str(P), "sampler": "ancestral",
                  "guidance": "1.0", "spec": args.rewards, "prompts": Path(args.prompts).name}
        part, kept = args.out.with_suffix(".part"), {"R": R.float(), "sigmas": sigmas}
        how = args.alpha, args.estimator, args.pool
        try:
            D, (stderr_D, stderr) = renyi_divergence(R, *how), bootstrap_stderr(R, *how)
        except ValueError as error:
            save_file(kept, part, about)
            words = str(error).split()
            where = list(rewards)[int(words[2])] if words[:2] == ["reward", "row"] else ""
            fail(f"{where} {error}; the rollouts are in {part}")
        D = monotone(D) if args.monotone else D                                     # (m,T+1)
        gain = D.diff(dim=-1)                                                       # (m,T)
        save_file({"gain": gain, "stderr": stderr, "D": D, "stderr_D": stderr_D, **kept}, part,
                  about)
        os.replace(part, args.out)
        title = (f"{Path(args.model).name} {args.setting}, alpha {args.alpha:g}, {args.estimator}, "
                 f"{args.proposal}, P {P} N {N} K {K}, seed {args.seed}")
        plot_curves(args.out.with_suffix(".png"), list(rewards), sigmas, gain, stderr, D, stderr_D,
                    title)
        for i, name in enumerate(rewards):
            if D[i, -1] <= 2 * stderr_D[i, -1]:
                say(f"{name:>16}  total {D[i, -1]:.4f} +- {stderr_D[i, -1]:.4f} nats: no usable "
                    "curve, raise --P and --N")
                continue
            spread, peak = (gain[i] - gain[i].mean()).norm() / stderr[i].norm(), gain[i].argmax()
            say(f"{name:>16}  total {D[i, -1]:.4f} +- {stderr_D[i, -1]:.4f} nats, most at sigma "
                f"{sigmas[peak]:.2f}-{sigmas[peak + 1]:.2f}, profile / its error {spread:.1f}")
        say(f"wrote {args.out} and its .png")


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    main()
