"""Held-out evaluation at equal seeds, and the few functions that make a policy produce images.

Paper: ReCAST (arXiv 2609.13425), section 4 and appendix D: rewards and judges per run, paired.
    python evaluate.py runs/recast runs/static                # base against each run

B images, n prompts, m rewards, T steps; sigmas (T+1,) noise levels, index 0 the noisiest (t = 1).
"""

import argparse
import atexit
import hashlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from rewards import load_prompts, load_rewards, score

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"} | os.environ
HERE, CHECKPOINT = Path(__file__).resolve().parent, "checkpoint-" + "[0-9]" * 5
SD35 = "stabilityai/stable-diffusion-3.5-medium"
TOY = "toy.py:clipscore,toy.py:preference,toy.py:detail"          # in both settings of the toy
# Rewards, held-out judges and prompt lists of each model's settings, in the order of --lam.
SETTINGS = {
    "toy": {"ocr": (f"toy.py:ocr,{TOY}", "ocr,toy.py:strict,toy.py:second_clip", "toy"),
            "geneval": (f"toy.py:geneval,{TOY}", "ocr,toy.py:ocr,toy.py:second_clip", "toy")},
    SD35: {"ocr": ("ocr,clipscore,hpsv2,pickscore", "aesthetic", "ocr"),
           "geneval": ("geneval,clipscore,hpsv2,pickscore", "geneval_strict,aesthetic", "geneval")}}
# What a model wants: image size, T5 tokens (SD3 without T5 still wants them, as zeros), dtype, pi+.
MODELS = {"toy": {"size": 64, "text_tokens": 0, "dtype": "float32", "proposal": "toy.py:render"},
          SD35: {"size": 512, "text_tokens": 256, "dtype": "bfloat16", "proposal": "cfg"}}


# ------------------------------------------------------------ what the other programs share
def generator(*key):
    """A CPU generator that depends on the key alone: (seed, purpose, epoch, index)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def normal(shape, *key, index):
    """Standard normal (len(index), *shape), row by row from generator(*key, i)."""
    return torch.stack([torch.randn(shape, generator=generator(*key, int(i))) for i in index])


def choose_model(args, fail):
    """Fill in what the model wants; returns its key in the tables (SD3.5's for others) and a line
    to print. No --model: SD3.5-Medium where CUDA and its cached weights are, else the toy."""
    args.offline, why = not args.model, "named"
    if not args.model:
        args.model, why = "toy", "no CUDA device"
        if torch.cuda.is_available():
            from huggingface_hub import try_to_load_from_cache
            args.model, why = SD35, "CUDA and cached weights"
            if not isinstance(try_to_load_from_cache(SD35, "model_index.json"), str):
                args.model, why = "toy", f"{SD35} is not in the local cache"
    if not any(p.is_dir() for p in (Path(args.model), HERE / args.model)) and "/" not in args.model:
        fail(f"--model {args.model}: no such folder, and a hub name is OWNER/NAME")
    key = Path(args.model).name if Path(args.model).name in MODELS else SD35
    vars(args).update({k: v for k, v in MODELS[key].items() if getattr(args, k, v) is None})
    return key, f"model {args.model} ({why}; choose another with --model)"


def load_pipeline(model, dtype, offline=False, t5=True):
    """StableDiffusion3Pipeline from a folder (also one beside this file) or a hub name, frozen, on
    the CPU. dtype is the transformer's and the encoders', the autoencoder's is float32; offline:
    the local cache only; t5 False: no third encoder. ValueError: no pipeline's folder."""
    warnings.filterwarnings("ignore", "Already found a `peft_config`")    # adapters, on purpose
    import diffusers
    import transformers
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    folder = next((p for p in (Path(model), HERE / model) if p.is_dir()), None)
    parts = {} if t5 else {"text_encoder_3": None, "tokenizer_3": None}
    if folder:                                        # a null entry must be said again as None
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"--model {model}: {index} is missing; give a diffusers SD3 folder")
        parts |= {k: None for k, v in json.loads(index.read_text()).items() if v == [None, None]}
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(
        folder or model, dtype={"default": dtype, "vae": torch.float32}, use_safetensors=True,
        local_files_only=offline, **parts)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    if pipe.vae.config.sample_size > 64:              # large pictures are decoded one at a time
        pipe.vae.enable_slicing()
    return pipe


def load_lora(pipe, folder, name="lora"):
    """A checkpoint of train.py into the transformer, under an adapter name, in float32 (diffusers
    alone would round it to the transformer's dtype)."""
    file = "pytorch_lora_weights.safetensors"
    pipe.transformer.load_lora_adapter(folder, adapter_name=name, weight_name=file,
                                       use_safetensors=True, local_files_only=True)
    saved = load_file(Path(folder) / file)
    for n, p in pipe.transformer.named_parameters():
        if f".{name}." in n:
            p.data = saved["transformer." + n.replace(f".{name}.", ".")].to(p.device)


@torch.no_grad()
def encode_prompts(pipe, lists, tokens, device, batch=64):
    """Text (n, L, d) and pooled (n, d) embeddings, on the CPU, of each list; every prompt once. The
    encoders visit the device for it and are freed, only then the transformer moves in."""
    for part in filter(None, (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)):
        part.to(device)
    unique = list(dict.fromkeys(p for prompts in lists for p in prompts))
    parts = [[e.cpu() for e in pipe.encode_prompt(
        unique[k:k + batch], None, None, max_sequence_length=tokens, device=device,
        do_classifier_free_guidance=False)[::2]] for k in range(0, len(unique), batch)]
    whole, index = [torch.cat(e) for e in zip(*parts)], {p: k for k, p in enumerate(unique)}
    pipe.text_encoder = pipe.text_encoder_2 = pipe.text_encoder_3 = part = parts = None
    torch.cuda.empty_cache()                          # does nothing without CUDA
    pipe.to(device)
    return [tuple(e[[index[p] for p in prompts]] for e in whole) for prompts in lists]


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
    if bad := int((~latents.flatten(1).isfinite().all(1)).sum()):
        raise FloatingPointError(f"{bad} of {len(latents)} latents are not finite")
    config = pipe.vae.config
    images = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
    return (images / 2 + 0.5).clamp(0, 1).cpu()


def write(path, text):
    """A text file, whole or not at all."""
    Path(f"{path}.part").write_text(text)
    os.replace(f"{path}.part", path)


def stop(program, error):
    """A user's mistake: one line, once per machine, and exit status 2."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"{program}: {str(error).splitlines()[0]}", file=sys.stderr)
    raise SystemExit(2)


def latent_shape(pipe, size):
    """(C, h, w) of the latents of a size x size image; ValueError for a size it cannot make."""
    unit, c = pipe.vae_scale_factor * pipe.patch_size, pipe.transformer.config
    if size % unit or not 0 < size <= unit * c.pos_embed_max_size:
        raise ValueError(f"--size {size}: expected a multiple of {unit}, at most "
                         f"{unit * c.pos_embed_max_size}")
    return c.in_channels, size // pipe.vae_scale_factor, size // pipe.vae_scale_factor


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
    """Index lists of one size: a batch of another would change images, and rewards, by rounding."""
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
        store = next(dist.rendezvous("env://"))[0]    # after a restart, no address of before it
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if gpus >= here else "gloo", store=store, rank=rank,
                                world_size=world)
        atexit.register(dist.destroy_process_group)   # else gloo may crash at the very end
    return rank, world, device


def summed(tensor, device):
    """Sum over processes, each of which filled in its own part of a tensor of zeros."""
    if dist.is_initialized():
        dist.all_reduce(total := tensor.to(device))
        tensor = total.to(tensor.device)
    return tensor


def picture(x):
    """An image (3,H,W) in [0, 1] as a Pillow image."""
    from PIL import Image
    return Image.fromarray((x * 255).round().byte().permute(1, 2, 0).numpy())


def save_grid(path, images, columns=8):
    """A PNG of images (B,3,H,W), row by row, with white lines between."""
    frame = (1, 1, 1, 1, 0, 0, 0, -len(images) % columns)
    images = torch.nn.functional.pad(images, frame, value=1.0)
    rows = images.unflatten(0, (-1, columns)).permute(2, 0, 3, 1, 4)      # (3,rows,H,columns,W)
    picture(rows.flatten(3).flatten(1, 2)).save(f"{path}.part", format="PNG")
    os.replace(f"{path}.part", path)


def evaluate(pipe, name, held, sigmas, rewards, micro_batch, size, guidance=1.0, keep=16,
             files=None):
    """Scores (m, n) float64 of one image per prompt under one adapter; the first `keep` images.
    held: prompts, metadata, their embeddings, those of ""; files: where to write pictures. Noise
    depends on the prompt's index alone, whatever the policy and the processes; no padding."""
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
        for i, x in zip(index, images if files else ()):
            picture(x).save(files[i])
        scores[:, index] = score(rewards, images, [prompts[i] for i in index],
                                 [metadata[i] for i in index])
    return summed(scores, device), summed(kept, device)


def table(before, after, names, judges):
    """Markdown lines from scores (m, n): mean of base and trained, mean of the paired difference
    and its standard error. A pair with a score that is not finite is left out."""
    m = len(names) - len(judges)
    rows = {"sum of rewards": (before[:m].sum(0), after[:m].sum(0))}
    rows |= {n + " (judge)" * (n in judges): x for n, *x in zip(names, before, after)}
    lines = [f"| n = {before.shape[1]} | base | trained | difference |", "|---|---|---|---|"]
    for name, pair in rows.items():
        both = torch.stack(pair)                                          # (2,n)
        b, a = both[:, both.isfinite().all(0)]
        lines.append(f"| {name} | {b.mean():.3f} | {a.mean():.3f} | {(a - b).mean():+.3f} +- "
                     f"{(a - b).std() / len(a) ** 0.5:.3f} |")
    return lines


def plot_runs(path, runs):
    """PNG: held-out rewards and their sum over epochs, a line per kind of weights, mean and range
    over seeds (one run: +- 1 standard error); at the right the loss by step in the last epoch."""
    from matplotlib.figure import Figure
    kinds, names = {}, next(iter(runs.values()))["names"]
    for run, args in runs.items():
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        kinds.setdefault(args["kind"], []).append(list(lines))
    figure = Figure(figsize=(2.6 * len(names) + 5.2, 3), layout="constrained")
    axes = figure.subplots(1, len(names) + 2)
    for kind, seeds in kinds.items():
        shown = [{x["epoch"]: x for x in lines if "eval" in x} for lines in seeds]
        epochs = sorted(set.intersection(*map(set, shown)))
        y, e = (torch.tensor([[seed[k][what] for k in epochs] for seed in shown]).double().view(
            len(seeds), len(epochs), len(names)) for what in ("eval", "eval_stderr"))
        y = torch.cat([y, y.sum(2, keepdim=True)], 2)                     # the sum has no error
        e = torch.nn.functional.pad(e, (0, 1)) * (len(seeds) == 1)
        for axis, mid, low, high in zip(axes, y.mean(0).T, (y - e).amin(0).T, (y + e).amax(0).T):
            axis.plot(epochs, mid, "o-", ms=3, label=f"{kind}, {len(seeds)} seeds")
            axis.fill_between(epochs, low, high, alpha=0.2)
        last = [[x["loss_by_step"] for x in lines if "loss_by_step" in x][-1] for lines in seeds]
        axes[-1].plot(torch.tensor(last).mean(0), "o-", ms=3)
    axes[-2].legend(fontsize=7)
    for axis, title in zip(axes, [*names, "held-out sum, over epochs", "loss by step, from noise"]):
        axis.set_title(title, fontsize=9)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(f"{path}.part", format="png", dpi=90)
    os.replace(f"{path}.part", path)


def newest_checkpoint(run, say=print):
    """Folder, epoch and step of a run's last checkpoint whose files have their stored sha256;
    damaged ones are passed over aloud. ValueError: there is no whole one."""
    for folder in sorted(Path(run).glob(CHECKPOINT), reverse=True):
        try:
            state = json.loads((folder / "state.json").read_text())
            for name in ("pytorch_lora_weights.safetensors", "state.safetensors"):
                if hashlib.sha256((folder / name).read_bytes()).hexdigest() != state[name]:
                    raise ValueError(f"{name} is not what was saved")
            return folder, int(state["epoch"]), int(state["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"{folder} is damaged and passed over: {error!r:.200}")
    raise ValueError(f"{run}: not a run folder of train.py with a whole checkpoint")


def sample_runs(args, runs, checkpoints):
    """Scores of the base and every run at equal prompts and noise: what results.json holds."""
    (rank, _, device), first = processes(), runs[args.runs[0]]
    for key in "model rewards eval_list eval_steps guidance size dtype t5 text_tokens".split():
        for run, own in runs.items():
            if own[key] != first[key]:
                raise ValueError(f"{run}: {key} {own[key]} differs from {args.runs[0]}'s")
    code = set(re.findall(r"([^,]*)\.py:", f"{first['rewards']},{first['judges']}")) - {"toy"}
    if code and None in (args.rewards, args.judges):
        raise ValueError(f"{args.runs[0]} names code, {code}.py: if you trust it, give --rewards "
                         "and --judges yourself")
    rewards, judges = (load_rewards(first[key] if own is None else own, device)
                       for key, own in (("rewards", args.rewards), ("judges", args.judges)))
    both = rewards | judges | rewards                     # in this order; a reward is no judge
    lists = load_prompts(first["eval_list"], both.values())
    prompts, metadata = (x[:args.eval_prompts] for x in lists)
    pipe = load_pipeline(first["model"], getattr(torch, first["dtype"]), True, first["t5"])
    for k, checkpoint in enumerate(checkpoints):
        load_lora(pipe, checkpoint, f"run{k}")
    text, empty = encode_prompts(pipe, [prompts, [""]], first["text_tokens"], device)
    n, scores, images, lines, folder = len(prompts), {}, {}, [], args.out / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(["base", *map(str, runs)]):
        lines += [x | {"index": i, "run": name, "file": f"{i:06d}.png"}
                  for i, x in enumerate(metadata, k * n)]
        scores[name], images[name] = evaluate(
            pipe, f"run{k - 1}" if k else None, (prompts, metadata, text, empty),
            noise_levels(pipe, first["eval_steps"]), both, first["micro_batch"], first["size"],
            first["guidance"], 12, [folder / x["file"] for x in lines[-n:]])
    if rank == 0:
        save_grid(args.out / "grid.png", torch.cat([*images.values()]), 12)
        write(folder / "prompts.jsonl", "".join(json.dumps(x) + "\n" for x in lines))
    return {"rewards": [*rewards], "judges": [*both][len(rewards):], "prompts": prompts,
            "sources": {k: getattr(f, "source", "") for k, f in both.items()},
            "runs": {str(k): v for k, v in runs.items()}, "scores": scores}


def main(argv=None):
    """Score the base and every run on the same prompts and noise; write the table and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error, add = lambda error: stop("evaluate.py", error), parser.add_argument
    add("runs", nargs="+", type=Path, help="run folders of train.py, one model")
    add("--eval-prompts", type=int, default=256, help="held-out prompts, 2 or more")
    add("--rewards", help="comma list (default: those of the first run)")
    add("--judges", help="held-out rewards (default: those of the first run)")
    add("--out", type=Path, default=Path("runs/evaluation"), help="folder to write")
    args = parser.parse_args(argv)
    try:
        if args.eval_prompts < 2 or len(set(args.runs)) < len(args.runs):
            raise ValueError(f"--eval-prompts {args.eval_prompts}: expected 2 or more, runs once")
        checkpoints = [newest_checkpoint(run)[0] for run in args.runs]
        runs = {run: json.loads((run / "args.json").read_text()) for run in args.runs}
        results = sample_runs(args, runs, checkpoints)
    except (ValueError, OSError, LookupError, TypeError, SafetensorError) as error:
        parser.error(error)
    if processes()[0]:
        return
    names, judges, scores, lines = *(results[k] for k in ("rewards", "judges", "scores")), []
    m, base, groups = len(names), scores["base"], {"base": [scores["base"].nanmean(1)]}
    for run, own in runs.items():
        lines += [f"## {run} ({own['kind']}, seed {own['seed']})", ""]
        lines += [*table(base, scores[str(run)], names + judges, judges), ""]
        groups.setdefault(own["kind"], []).append(scores[str(run)].nanmean(1))
    columns = ["weights", "runs", "sum of rewards", *names, *(f"{j} (judge)" for j in judges)]
    lines += ["## means over runs", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for kind, means in groups.items():
        mean = torch.stack(means)                                         # (runs, m + judges)
        total = mean[:, :m].sum(1)
        spread = f" +- {total.std() / len(total) ** 0.5:.3f}" if len(total) > 1 else ""
        cells = " | ".join(f"{x:.3f}" for x in mean.mean(0))
        lines.append(f"| {kind} | {len(means)} | {total.mean():.3f}{spread} | {cells} |")
    write(args.out / "table.md", "\n".join(lines) + "\n")
    write(args.out / "results.json", json.dumps(results, default=torch.Tensor.tolist))
    print("\n".join(lines))
    plot_runs(args.out / "curves.png", runs)
    print(f"wrote {args.out}: table.md, results.json, curves.png, grid.png (rows: base, runs)")


if __name__ == "__main__":
    main()
