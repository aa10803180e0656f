"""Held-out evaluation at equal seeds, and the few functions that make a policy produce images.

Paper: ReCAST (arXiv 2609.13425), section 4 and appendix D: rewards and judges per run, paired.
train.py and estimate.py import from here; this file imports rewards.py only.

    python evaluate.py runs/recast runs/static                # base against each run

B images, n prompts, m rewards, T steps; sigmas (T+1,) noise levels, index 0 the noisiest (t = 1).
"""

import argparse
import hashlib
import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from rewards import load_rewards, score

HERE = Path(__file__).resolve().parent
SD35 = "stabilityai/stable-diffusion-3.5-medium"
# Rewards, held-out judges and prompt lists of each model's settings, in the order of --lam.
SETTINGS = {
    "toy": {
        "ocr": ("toy.py:ocr,toy.py:clipscore,toy.py:preference,toy.py:detail",
                "ocr,toy.py:strict,toy.py:second_clip,toy.py:nearest", "toy"),
        "geneval": ("toy.py:geneval,toy.py:clipscore,toy.py:preference,toy.py:detail",
                    "ocr,toy.py:ocr,toy.py:second_clip,toy.py:nearest", "toy")},
    SD35: {
        "ocr": ("ocr,clipscore,hpsv2,pickscore", "aesthetic", "ocr"),
        "geneval": ("geneval,clipscore,hpsv2,pickscore", "aesthetic", "geneval")}}
# What a model wants: image size, T5 tokens (SD3 without T5 still wants them, as zeros), dtype, pi+.
MODELS = {"toy": {"size": 64, "text_tokens": 0, "dtype": "float32", "proposal": "toy.py:render"},
          SD35: {"size": 512, "text_tokens": 256, "dtype": "bfloat16", "proposal": "self"}}


# ------------------------------------------------------------ what the other programs share
def generator(*key):
    """A CPU generator that depends on the key alone: (seed, purpose, epoch, index)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def normal(shape, *key, index):
    """Standard normal (len(index), *shape), row by row from generator(*key, i)."""
    return torch.stack([torch.randn(shape, generator=generator(*key, int(i))) for i in index])


def default_model():
    """SD3.5-Medium where CUDA and its cached weights are, the miniature elsewhere; and why."""
    if not torch.cuda.is_available():
        return "toy", "no CUDA device"
    from huggingface_hub import try_to_load_from_cache
    if not isinstance(try_to_load_from_cache(SD35, "model_index.json"), str):
        return "toy", f"{SD35} is not in the local cache"
    return SD35, "CUDA and cached weights"


def choose_model(args, fail):
    """Set args.model, args.offline and what the model wants; returns its key in the tables and the
    first line to print. A folder or hub name that is no key counts as an SD3.5."""
    name, why = (args.model, "named") if args.model else default_model()
    args.offline, args.model = not args.model, name
    if not any(p.is_dir() for p in (Path(name), HERE / name)) and "/" not in name:
        fail(f"--model {name}: no such folder, and a hub name is OWNER/NAME")
    key = Path(name).name if Path(name).name in MODELS else SD35
    for k, value in MODELS[key].items():
        if getattr(args, k, value) is None:
            setattr(args, k, value)
    return key, f"model {name} ({why}; choose another with --model)"


def load_pipeline(model, dtype, device, offline=False):
    """StableDiffusion3Pipeline from a folder (also one beside this file) or a hub name, frozen.

    dtype is the transformer's and the text encoders'; the autoencoder is float32. offline: only
    the local cache. ValueError: a folder that is not a pipeline's."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", "Already found a `peft_config`")    # adapters, on purpose
    import diffusers
    import transformers
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    folder = next((p for p in (Path(model), HERE / model) if p.is_dir()), None)
    parts = {}
    if folder:                                        # a null entry must be said again as None
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"--model {model}: {index} is missing; give a diffusers SD3 folder")
        parts = {k: None for k, v in json.loads(index.read_text()).items() if v == [None, None]}
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(
        folder or model, dtype={"default": dtype, "vae": torch.float32}, use_safetensors=True,
        local_files_only=offline, **parts)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval().to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_lora(pipe, folder, name="lora"):
    """A checkpoint of train.py into the transformer, under an adapter name, from safetensors."""
    pipe.transformer.load_lora_adapter(
        folder, adapter_name=name, weight_name="pytorch_lora_weights.safetensors",
        use_safetensors=True, local_files_only=True)


@torch.no_grad()
def encode_prompts(pipe, prompts, tokens, batch=64):
    """Text (n, L, d) and pooled (n, d) embeddings on the CPU; duplicates are encoded once."""
    unique = list(dict.fromkeys(prompts))
    parts = [pipe.encode_prompt(unique[k:k + batch], None, None, max_sequence_length=tokens,
                                do_classifier_free_guidance=False)[::2]
             for k in range(0, len(unique), batch)]
    index = {p: k for k, p in enumerate(unique)}
    where = [index[p] for p in prompts]
    return tuple(torch.cat([p[k].cpu() for p in parts])[where] for k in (0, 1))


def noise_levels(pipe, steps):
    """The scheduler's own sigmas (T+1,), float32: 1 at index 0, 0 at index T."""
    pipe.scheduler.set_timesteps(steps)
    return pipe.scheduler.sigmas.float().cpu()


def velocity(net, x, t, text, guidance=1.0, empty=None):
    """v (B,C,h,w) float32 at level t, a number or (B,); text = (embeddings, pooled) of B prompts.

    Guidance other than 1 also needs the embeddings of the empty prompt: v0 + g (v - v0)."""
    t = torch.as_tensor(t, device=x.device).expand(len(x))
    text, pooled = (e.to(x.device, net.dtype) for e in text)
    v = net(x.to(net.dtype), timestep=1000 * t, encoder_hidden_states=text,
            pooled_projections=pooled).sample.float()
    if guidance == 1.0:
        return v
    v0 = velocity(net, x, t, tuple(e.expand(len(x), *e.shape[1:]) for e in empty))
    return v0 + guidance * (v - v0)


@torch.no_grad()
def sample(pipe, text, sigmas, noise, guidance=1.0, empty=None):
    """Euler steps of the probability-flow ODE from noise (B,C,h,w) at level 1 to data."""
    x = noise
    for t, s in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        x = x + (s - t) * velocity(pipe.transformer, x, t, text, guidance, empty)
    return x


@torch.no_grad()
def decode(pipe, latents):
    """Images (B,3,H,W) float32 in [0, 1] on the CPU; latents that are not finite are refused."""
    if not latents.isfinite().all():
        bad = int((~latents.flatten(1).isfinite().all(1)).sum())
        raise FloatingPointError(f"{bad} of {len(latents)} latents are not finite")
    config = pipe.vae.config
    images = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
    return (images / 2 + 0.5).clamp(0, 1).cpu()


def split(text):
    """The items of a comma list; none of an empty one."""
    return [x for x in text.split(",") if x]


def latent_shape(pipe, size):
    """(C, h, w) of the latents of a size x size image; ValueError for a size it cannot make."""
    unit = pipe.vae_scale_factor * pipe.patch_size
    most = unit * pipe.transformer.config.pos_embed_max_size
    if size % unit or not 0 < size <= most:
        raise ValueError(f"--size {size}: expected a multiple of {unit}, at most {most}")
    side = size // pipe.vae_scale_factor
    return pipe.transformer.config.in_channels, side, side


def load_prompts(path):
    """Prompts and metadata of a .txt list (a prompt a line) or .jsonl (an object with "prompt").

    ValueError names file and line: empty, not JSON, no prompt, over 2,000 characters."""
    prompts, metadata = [], []
    for n, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), 1):
        try:
            facts = json.loads(line) if Path(path).suffix == ".jsonl" else {"prompt": line.strip()}
            prompt = facts["prompt"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path}:{n}: expected a JSON object with a "prompt"') from None
        if not isinstance(prompt, str) or not prompt.strip() or len(prompt) > 2000:
            raise ValueError(f"{path}:{n}: expected a prompt of 1 to 2,000 characters")
        prompts.append(prompt)
        metadata.append(facts)
    if not prompts:
        raise ValueError(f"{path}: expected at least one prompt")
    return prompts, metadata


def use(net, name):
    """Switch to one adapter, or to the base with None; only `default` ever requires gradients."""
    if name is not None:
        net.enable_adapters()
        net.set_adapter(name)
    elif hasattr(net, "peft_config"):
        net.disable_adapters()
    for n, p in net.named_parameters():
        p.requires_grad_(".default." in n)


def chunks(n, size):
    """Index lists of fixed size whatever the number of processes; a batch of another size would
    change images by rounding, and a discrete reward with them."""
    return [list(range(k, min(k + size, n))) for k in range(0, n, size)]


def processes():
    """rank, world, device; joins the process group of torchrun once, if there is one."""
    rank, world, local, here = (int(os.environ.get(k, d)) for k, d in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    gpus = torch.cuda.device_count()
    device = torch.device(f"cuda:{local % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)                      # another number would round differently
    if world > 1 and not dist.is_initialized():       # NCCL wants a device for each process
        dist.init_process_group("nccl" if gpus >= here else "gloo")
    return rank, world, device


def summed(tensor, device):
    """Sum over processes, each of which filled in its own part of a tensor of zeros."""
    if dist.is_initialized():
        total = tensor.to(device)
        dist.all_reduce(total)
        tensor = total.to(tensor.device)
    return tensor


def save_grid(path, images, columns=8):
    """A PNG of images (B,3,H,W), row by row."""
    from PIL import Image
    B, _, H, W = images.shape
    rows = -(-B // columns)
    sheet = Image.new("RGB", (columns * (W + 2), rows * (H + 2)), "white")
    for k, x in enumerate((images * 255).round().byte().permute(0, 2, 3, 1).numpy()):
        sheet.paste(Image.fromarray(x), (k % columns * (W + 2), k // columns * (H + 2)))
    sheet.save(f"{path}.part", format="PNG")
    os.replace(f"{path}.part", path)


def evaluate(pipe, name, held, sigmas, rewards, micro_batch, size, guidance=1.0, keep=16):
    """Scores (m, n) float64 of one image per prompt under one adapter; the first `keep` images.

    held: prompts, metadata, their embeddings, those of "". Noise depends on the prompt's index
    alone, so every policy and any number of processes sees the same; nothing is padded."""
    rank, world, device = processes()
    prompts, metadata, text, empty = held
    use(pipe.transformer, name)
    scores = torch.zeros(len(rewards), len(prompts), dtype=torch.float64)
    kept = torch.zeros(min(keep, len(prompts)), 3, size, size)
    mine = chunks(len(prompts), micro_batch)[rank::world]
    for index in tqdm(mine, f"evaluate {name or 'base'}", leave=False, disable=rank > 0 or None):
        noise = normal(latent_shape(pipe, size), "evaluate", index=index).to(device)
        words = tuple(e[index] for e in text)
        images = decode(pipe, sample(pipe, words, sigmas, noise, guidance, empty))
        shown = [i for i in index if i < len(kept)]
        kept[shown] = images[:len(shown)]
        scores[:, index] = score(rewards, images, [prompts[i] for i in index],
                                 [metadata[i] for i in index])
    return summed(scores, device), summed(kept, device)


def paired(before, after):
    """Mean of before, of after, of the difference, and the standard error of that, over (n,).

    A pair with a score that is not finite is left out."""
    both = before.isfinite() & after.isfinite()
    before, after = before[both], after[both]
    gap = after - before
    return [x.item() for x in (before.mean(), after.mean(), gap.mean(),
                               gap.std() / len(gap) ** 0.5)]


def table(before, after, names, judges):
    """Markdown lines: base, trained, paired difference with its standard error for each reward."""
    m = len(names) - len(judges)
    rows = [("sum of rewards", before[:m].sum(0), after[:m].sum(0))]
    rows += [(f"{n} (judge)" if n in judges else n, before[i], after[i])
             for i, n in enumerate(names)]
    lines = [f"| n = {before.shape[1]} | base | trained | difference |", "|---|---|---|---|"]
    for name, b, a in rows:
        mean_b, mean_a, gap, error = paired(b, a)
        lines.append(f"| {name} | {mean_b:.3f} | {mean_a:.3f} | {gap:+.3f} +- {error:.3f} |")
    return lines


def kind_of(args):
    """What runs of different seeds have in common: kind of weights and budgets."""
    return f"{args['weights']} {','.join(f'{x:g}' for x in args['lam'])}"


def plot_runs(path, runs):
    """PNG: held-out sum of rewards over epochs, one line per kind of weights, mean and range."""
    from matplotlib.figure import Figure
    curves = {}
    for run, args in runs.items():
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        shown = {x["epoch"]: sum(x["eval"]) for x in lines if "eval" in x}
        curves.setdefault(kind_of(args), []).append(shown)
    axes = Figure(figsize=(6, 4), layout="constrained").add_subplot()
    for kind, seeds in curves.items():
        epochs = sorted(set.intersection(*map(set, seeds)))
        values = torch.tensor([[seed[e] for e in epochs] for seed in seeds])      # (seeds, epochs)
        axes.plot(epochs, values.mean(0), "o-", label=f"{kind}, {len(seeds)} seeds")
        axes.fill_between(epochs, values.amin(0), values.amax(0), alpha=0.2)
    axes.set(xlabel="epoch", ylabel="held-out sum of rewards", title="mean and range over seeds")
    axes.legend()
    axes.figure.savefig(f"{path}.part", format="png", dpi=100)
    os.replace(f"{path}.part", path)


def main(argv=None):
    """Score the base and every run on the same prompts and noise; write the table and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda error: parser.exit(2, f"evaluate.py: {str(error).splitlines()[0]}\n")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of train.py, one model")
    parser.add_argument("--eval-prompts", type=int, default=256, help="held-out prompts, 2 or more")
    parser.add_argument("--judges", help="held-out rewards (default: those of the first run)")
    parser.add_argument("--out", type=Path, default=Path("runs/evaluation"), help="folder to write")
    args = parser.parse_args(argv)
    rank, world, device = processes()
    try:
        if args.eval_prompts < 2:
            raise ValueError(f"--eval-prompts {args.eval_prompts}: expected at least 2")
        if len(set(args.runs)) < len(args.runs):
            raise ValueError("runs: expected every run once")
        for run in args.runs:
            if not (run / "latest").is_file():
                raise ValueError(f"{run}: not a run folder of train.py with a checkpoint")
        runs = {run: json.loads((run / "args.json").read_text()) for run in args.runs}
        first = runs[args.runs[0]]
        for key in ("model", "rewards", "eval_list", "eval_steps", "guidance", "size", "dtype",
                    "text_tokens"):
            for run, own in runs.items():
                if own[key] != first[key]:
                    raise ValueError(f"{run}: {key} {own[key]} differs from {args.runs[0]}'s")
        names = load_rewards(split(first["rewards"]), device)
        judges = load_rewards(split(first["judges"] if args.judges is None else args.judges),
                              device)
        judges = {k: f for k, f in judges.items() if k not in names}
        prompts, metadata = (x[:args.eval_prompts] for x in load_prompts(first["eval_list"]))
        pipe = load_pipeline(first["model"], getattr(torch, first["dtype"]), device)
        for k, run in enumerate(runs):
            folder = run / (run / "latest").read_text()
            load_lora(pipe, folder, f"run{k}")
    except (ValueError, OSError, KeyError) as error:
        parser.error(error)
    text, empty = (encode_prompts(pipe, x, first["text_tokens"]) for x in (prompts, [""]))
    sigmas, scores, shown = noise_levels(pipe, first["eval_steps"]), {}, []
    for name in ["base", *runs]:
        if rank == 0:
            print(f"evaluating {name} on {len(prompts)} prompts", flush=True)
        adapter = None if name == "base" else f"run{list(runs).index(name)}"
        scores[str(name)], images = evaluate(
            pipe, adapter, (prompts, metadata, text, empty), sigmas, names | judges,
            first["micro_batch"], first["size"], first["guidance"], keep=12)
        shown.append(images)
    if rank:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    m, base, lines, groups = len(names), scores["base"], [], {}
    for run, own in runs.items():
        lines += [f"## {run} ({kind_of(own)}, seed {own['seed']})", ""]
        lines += [*table(base, scores[str(run)], [*names, *judges], list(judges)), ""]
        groups.setdefault(kind_of(own), []).append(scores[str(run)].nanmean(1))
    lines += ["## means over runs", "", "| weights | runs | sum of rewards | "
              + " | ".join([*names, *(f"{j} (judge)" for j in judges)]) + " |",
              "|---" * (3 + m + len(judges)) + "|"]
    for kind, means in {"base": [base.nanmean(1)], **groups}.items():
        mean = torch.stack(means)                                         # (runs, m + judges)
        total = mean[:, :m].sum(1)
        spread = f" +- {total.std() / len(total) ** 0.5:.3f}" if len(total) > 1 else ""
        cells = " | ".join(f"{x:.3f}" for x in mean.mean(0))
        lines.append(f"| {kind} | {len(means)} | {total.mean():.3f}{spread} | {cells} |")
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    (args.out / "results.json").write_text(json.dumps({
        "rewards": [*names], "judges": [*judges], "runs": {str(k): v for k, v in runs.items()},
        "prompts": prompts, "scores": {k: v.tolist() for k, v in scores.items()}}))
    save_grid(args.out / "grid.png", torch.cat(shown), 12)
    plot_runs(args.out / "curves.png", runs)
    print("\n".join(lines))
    print(f"wrote {args.out}: table.md, results.json, curves.png, grid.png (rows: base, runs)")


if __name__ == "__main__":
    main()
