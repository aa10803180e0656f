"""The training loop of ReCAST: DiffusionNFT on several rewards, each credited by its row of W.

Paper: ReCAST (arXiv 2609.13425), sections 3.4 and 4.1; DiffusionNFT (arXiv 2509.16117).
    SAMPLE images with the old policy -> SCORE them with m rewards -> CREDIT: advantage per reward,
    optimality r_i, r_mix = sum_i W_ij r_i / sum_i W_ij at step j -> UPDATE the LoRA -> old policy

    python train.py --lam 1,1,1,1                              # one process
    torchrun --nproc_per_node=2 train.py --lam 1,1,1,1         # any number; sizes are global

B images of an epoch, P prompts, T steps; sigmas (T+1,) noise levels, index 0 the noisiest (t = 1).
Three LoRA adapters, all float32: `default` is trained, `old` samples, `ema` is evaluated and saved.
Differences from DiffusionNFT's public loop
 1. Each reward has its own advantage and r_i; W mixes them at the step that is trained.
 2. The loss is not multiplied by the advantage clip (5 there), so the same kl_weight is worth five
    times more here, and the same max_grad_norm clips five times later.
 3. Images are drawn in fixed chunks by global index and gradients summed in float64, so the number
    of processes changes nothing but speed.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from estimate import load_curve
from evaluate import (
    CHECKPOINT, HERE, MODELS, SETTINGS, choose_model, chunks, decode, encode_prompts, evaluate,
    generator, latent_shape, load_pipeline, newest_checkpoint, noise_levels, normal, plot_runs,
    processes, sample, save_grid, stop, summed, table, use, velocity, write)
from nft_loss import credit, group_advantage, nft_loss, old_policy_decay, optimality
from renyi_gain import noised
from rewards import load_prompts, load_rewards, score
from sinkhorn import row_weights, sinkhorn

TARGETS = ["attn." + n for n in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj",
                                 "add_v_proj", "to_add_out")]
# flag, type, lowest, highest, default of the miniature, default of SD3.5 (the peers' recipe), help
FLAGS = [
    ("steps", int, 1, 1000, 10, 10, "denoising steps T"),
    ("eval-steps", int, 1, 1000, 10, 40, "denoising steps in evaluation"),
    ("eval-prompts", int, 2, 100000, 192, 256, "held-out prompts of an evaluation, one image each"),
    ("eval-every", int, 0, 10**6, 5, 20, "epochs between evaluations, 0: never"),
    ("save-every", int, 1, 10**6, 10, 20, "epochs between checkpoints"),
    ("keep", int, 1, 10**6, 3, 3, "checkpoints to keep, the newest"),
    ("epochs", int, 1, 99999, 20, 300, "epochs, counted from the start of the run"),
    ("prompts-per-epoch", int, 1, 10**6, 16, 48, "prompts P of an epoch"),
    ("images-per-prompt", int, 2, 10**6, 12, 24, "images per prompt, the group of the advantage"),
    ("micro-batch", int, 1, 10**6, 24, 8, "images in one forward pass"),
    ("updates", int, 1, 10**6, 4, 2, "optimiser steps per epoch"),
    ("levels", int, 1, 1000, 2, 10, "noise levels trained per image and epoch, at most --steps"),
    ("lr", float, 1e-9, 1, 1e-3, 3e-4, "learning rate of AdamW"),
    ("lora-rank", int, 1, 1024, 16, 32, "LoRA rank"),
    ("lora-alpha", float, 1e-3, 4096, 32, 64, "LoRA alpha; the adapter is scaled by alpha / rank"),
    ("beta", float, 1e-3, 10, 1.0, 1.0, "width of the NFT interpolation, not the KL weight"),
    ("adv-clip", float, 1e-3, 1e9, 2.0, 5.0, "advantages are clipped here; r is 0 or 1 beyond"),
    ("kl-weight", float, 0, 1e9, 1e-4, 1e-4, "weight of |v - v_base|^2, mean per element"),
    ("max-grad-norm", float, 1e-9, 1e9, 1.0, 1.0, "gradient clipping"),
    ("guidance", float, 0, 100, 1.0, 1.0, "guidance scale of sampling and evaluation, 1: off"),
    ("size", int, 8, 4096, 64, 512, "image side in pixels"),
    ("text-tokens", int, 0, 512, 0, 256, "T5 tokens; zeros where there is no third encoder"),
    ("t5", int, 0, 1, 0, 1, "1: load the third text encoder; 0: zeros in its place"),
    ("checkpointing", int, 0, 1, 0, 1, "1: recompute activations in the backward pass"),
    ("compile", int, 0, 1, 0, 0, "1: torch.compile the transformer"),
    ("tau", float, 1e-3, 1e9, 1.0, 1.0, "temperature of the Sinkhorn kernel"),
    ("decay", int, 1, 2, 1, 1, "recipe of the old policy's decay, 1 or 2 (used with beta .1)"),
    ("seed", int, 0, 2**31, 0, 0, "seed"),
]


def adapter(net, name):
    """The LoRA tensors of one adapter, in the model's order."""
    return [p for n, p in net.named_parameters() if f".{name}." in n]


def summary(scores):
    """Mean and standard error of each row of scores (m, n), over what is finite."""
    good = [row[row.isfinite()] for row in scores]
    return {"eval": [x.mean().item() for x in good],
            "eval_stderr": [x.std().item() / len(x) ** 0.5 for x in good]}


def check_same(args, stored):
    """A resumed run goes on as it began, but for how long, how often and where; else ValueError."""
    free = "epochs eval_every save_every keep out resume dry_run why curve judges offline".split()
    for k, v in vars(args).items():
        if k not in free and stored.get(k) != v:
            raise ValueError(f"--{k.replace('_', '-')} {v}: the run began with {stored.get(k)}")


@torch.no_grad()
def blend(slow, fast, d):
    """slow <- d slow + (1 - d) fast, tensor by tensor: the old policy and the average."""
    for a, b in zip(slow, fast, strict=True):
        a.lerp_(b, 1 - d)


def snapshot(net, opt):
    """What a checkpoint holds, copied to the CPU: the EMA as diffusers wants it, and the state."""
    from peft import get_peft_model_state_dict
    state = {n: p for n, p in net.named_parameters() if "lora_" in n}
    state |= {f"adam.{k}.{key}": value for k, moments in opt.state_dict()["state"].items()
              for key, value in moments.items()}
    return [{k: v.detach().to("cpu", copy=True).contiguous() for k, v in part.items()}
            for part in (get_peft_model_state_dict(net, adapter_name="ema"), state)]


def save_checkpoint(out, keep, epoch, step, lora, state, config):
    """out/checkpoint-EPOCH: a LoRA that diffusers loads, the state to resume from, checksums. It is
    written beside its place, flushed, renamed, and then all but the `keep` newest go."""
    from diffusers import StableDiffusion3Pipeline
    final, part = out / f"checkpoint-{epoch:05d}", out / f"checkpoint-{epoch:05d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    StableDiffusion3Pipeline.save_lora_weights(
        part, transformer_lora_layers=lora, transformer_lora_adapter_metadata=config)
    save_file(state, part / "state.safetensors")
    sums = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in part.iterdir()}
    write(part / "state.json", json.dumps({"epoch": epoch, "step": step, **sums}))
    for file in part.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(final, ignore_errors=True)         # a damaged one, or of a run that died here
    os.replace(part, final)
    write(out / "latest", final.name)
    whole = sorted(x for x in out.glob(CHECKPOINT) if x <= final)    # newer ones are damaged
    for other in {*out.glob(CHECKPOINT)} - {*whole[-keep:]}:
        shutil.rmtree(other)


def load_state(folder, net, opt):
    """Fill the three adapters and the optimiser. KeyError, RuntimeError: of another model."""
    state, moments = load_file(folder / "state.safetensors"), {}
    net.load_state_dict({n: state[n] for n, _ in net.named_parameters() if "lora_" in n},
                        strict=False)
    for key, value in state.items():
        if key.startswith("adam."):
            moments.setdefault(int(key.split(".")[1]), {})[key.split(".")[2]] = value
    opt.load_state_dict({"state": moments, "param_groups": opt.state_dict()["param_groups"]})


def parse(argv):
    """Arguments with the defaults of the model, each checked against its range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: stop("train.py", message)
    add = parser.add_argument
    add("--lam", default="1,1,1,1", type=lambda text: [float(x) for x in text.split(",")],
        help="budgets >= 0, one per reward, in the order of --rewards (default 1,1,1,1)")
    add("--setting", default="ocr", choices=["ocr", "geneval"],
        help="which rewards, judges and prompts (default ocr)")
    add("--model", help="diffusers SD3 folder or hub name (default: SD3.5-Medium or toy)")
    add("--rewards", help="comma list of built-in names and file.py:function")
    add("--judges", help="held-out rewards, scored at the end only; same form")
    add("--prompts", help="training prompts, .txt or .jsonl")
    add("--eval-list", help="held-out prompts, .txt or .jsonl")
    add("--curve", help="gain curves of estimate.py (default: curves/MODEL-SETTING.safetensors)")
    add("--weights", default="recast", choices=["recast", "static", "row"],
        help="W by Sinkhorn (default), lam/T, or the ablation without Sinkhorn")
    add("--std", default="global", choices=["global", "group"],
        help="std of the advantage (default global)")
    add("--dtype", choices=["float32", "bfloat16"], help="dtype of the frozen transformer")
    add("--out", default="runs/run", help="folder of the run (default runs/run)")
    add("--resume", nargs="?", const="yes", choices=["yes", "auto"],
        help="go on from the newest whole checkpoint of --out; auto: if there is one")
    add("--dry-run", action="store_true", help="print the plan and W, then stop")
    for name, kind, low, high, toy, sd35, text in FLAGS:
        add(f"--{name}", type=kind, help=f"{text}; {low} to {high} (toy {toy}, SD3.5 {sd35})")
    args = parser.parse_args(argv)
    key, args.why = choose_model(args, parser.error)
    for name, _, low, high, *defaults, _ in FLAGS:
        dest, high = name.replace("-", "_"), args.steps if name == "levels" else high
        if getattr(args, dest) is None:
            setattr(args, dest, min(defaults[list(MODELS).index(key)], high))
        if not low <= getattr(args, dest) <= high:
            parser.error(f"--{name} {getattr(args, dest)}: expected {low} to {high}")
    rewards, judges, stem = SETTINGS[key][args.setting]
    defaults = {"rewards": rewards, "judges": judges,
                "prompts": f"{HERE}/prompts/{stem}-train.jsonl",
                "eval_list": f"{HERE}/prompts/{stem}-heldout.jsonl",
                "curve": f"{HERE}/curves/{Path(args.model).name}-{args.setting}.safetensors"}
    vars(args).update({k: v for k, v in defaults.items() if getattr(args, k) is None})
    return args, parser.error


def main(argv=None):
    """Read from top to bottom: this is the whole method."""
    # ------------------------------------------------------------ SETUP
    args, fail = parse(argv)
    rank, world, device = processes()
    say = print if rank == 0 else lambda *a, **k: None
    say(args.why)
    out, T = Path(args.out), args.steps
    try:
        if (out / "metrics.jsonl").exists() and not args.resume and not args.dry_run:
            raise ValueError(f"--out {out}: a run is there; give --resume auto or another folder")
        saved = None                                          # checkpoint folder, epoch, step
        if args.resume == "yes" or args.resume and any(out.glob(CHECKPOINT)):
            saved = newest_checkpoint(out, say)
            check_same(args, json.loads((out / "args.json").read_text()))
            if saved[1] > args.epochs:
                raise ValueError(f"--epochs {args.epochs}: the run is at {saved[1]}")
        rewards, judges = (load_rewards(x, device) for x in (args.rewards, args.judges))
        both = rewards | judges | rewards             # in this order; a reward is no judge
        prompts, metadata = load_prompts(args.prompts, rewards.values())
        held = tuple(x[:args.eval_prompts] for x in load_prompts(args.eval_list, both.values()))
        pipe = load_pipeline(args.model, getattr(torch, args.dtype), args.offline, args.t5)
        shape = latent_shape(pipe, args.size)                             # (C,h,w)
        grey = torch.full((1, 3, args.size, args.size), 0.5)
        for name, f in both.items():                          # a first try, before work
            for path, lists in ((args.prompts, (prompts, metadata)), (args.eval_list, held)):
                try:
                    score({name: f}, grey, *(x[:1] for x in lists))
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"reward {name} cannot score {path}:1: {error}") from None
        sigmas = noise_levels(pipe, T)                                    # (T+1,)
        gain = (torch.full((len(rewards), T), torch.nan) if args.weights == "static"
                else load_curve(args, list(rewards), sigmas))             # (m,T), NaN: no curve
        W = (row_weights(gain, args.lam, args.tau) if args.weights == "row"
             else sinkhorn(gain, args.lam, args.tau)[0])                  # (m,T); static: all NaN
    except (ValueError, OSError, AttributeError, SafetensorError) as error:
        fail(error)
    net, names, m = pipe.transformer, list(rewards), len(rewards)
    kind = f"{args.weights} {','.join(map('{:g}'.format, args.lam))}"
    about = vars(args) | {"names": names, "kind": kind, "sources": {
        k: getattr(f, "source", "") for k, f in both.items()}}
    P = min(args.prompts_per_epoch, len(prompts))
    parts = chunks(B := P * args.images_per_prompt, args.micro_batch)
    if args.updates > len(parts):
        fail(f"--updates {args.updates}: expected at most {len(parts)}, the chunks of an epoch")
    say(f"{args.weights} weights, budgets {args.lam}; W in 1/(mT), from noise to data:")
    for i, name in enumerate(names):
        flat = " (no curve)" * bool(args.weights != "static" and not gain[i].sum() > 0)
        say(f"{name:>16} " + " ".join(f"{w:5.2f}" for w in W[i] * m * T) + flat)
    say(f"an epoch: {P} prompts x {args.images_per_prompt} images = {B}, in {len(parts)} chunks "
        f"over {world} processes; {args.updates} updates x about {B // args.updates} images x "
        f"{args.levels} levels")
    from peft import LoraConfig
    for name in ("default", "old", "ema"):
        torch.manual_seed(args.seed)                                      # three equal adapters
        net.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha,
                                   init_lora_weights="gaussian", target_modules=TARGETS), name)
    use(net, "default")
    new, old, ema = (adapter(net, name) for name in ("default", "old", "ema"))
    for p in (*new, *old, *ema):
        p.data = p.data.float()
    opt = torch.optim.AdamW(new, lr=args.lr, betas=(0.9, 0.999), weight_decay=1e-4)
    # Autograd keeps 57 bytes per token, channel and block; with checkpointing the inputs of all
    # blocks and the rest of one.  Test: test_the_memory_budget_counts
    tokens, blocks = pipe.tokenizer_max_length + args.text_tokens, len(net.transformer_blocks)
    tokens += shape[1] * shape[2] // pipe.patch_size**2
    kept = blocks * net.dtype.itemsize + 57 if args.checkpointing else blocks * 57
    kept *= args.micro_batch * tokens * net.inner_dim / 2**30
    frozen = sum(p.nbytes for n, p in net.named_parameters() if "lora_" not in n) / 2**30
    lora = 8 * sum(p.nbytes for p in new) / 2**30     # 3 adapters, gradient and its sum, 2 moments
    say(f"GiB on each device: transformer {frozen:.3f}, adapters and optimiser {lora:.3f}, "
        f"activations of {args.micro_batch} images {kept:.3f}")
    if args.dry_run:
        return
    text, known, empty = encode_prompts(pipe, [prompts, held[0], [""]], args.text_tokens, device)
    held, eval_sigmas = (*held, known, empty), noise_levels(pipe, args.eval_steps)
    if args.checkpointing:
        net.enable_gradient_checkpointing()
    if args.compile:
        net.compile()
    start = step = skipped = 0
    try:
        if saved:
            folder, start, step = saved
            load_state(folder, net, opt)
            say(f"resuming {folder} at epoch {start} of {args.epochs}")
        if rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            log = out / "metrics.jsonl"              # a resumed run drops what it will do again
            lines = log.read_text().splitlines() if start else []         # the last may be torn
            write(log, "".join(f"{x}\n" for x in lines if x[-1:] == "}"
                               and json.loads(x)["epoch"] < start))
            write(out / "args.json", json.dumps(about, indent=1))
            save_file({"W": W, "gain": gain, "sigmas": sigmas, "lam": torch.tensor(args.lam)},
                      out / "W.safetensors", {"rewards": ",".join(names)})
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        fail(f"--out {out}: {error}")
    config = net.peft_config["ema"].to_dict()
    last = (start, step, *snapshot(net, opt))                 # the last whole epoch

    def stopped(number, *error):
        """SIGTERM, Ctrl-C or an exception: keep the last whole epoch."""
        if rank == 0 and last[0] > start:
            save_checkpoint(out, args.keep, *last, config)
        say(f"stopped; {out} keeps the {last[0]} epochs that are whole", flush=True)
        if number in handlers:
            os._exit(128 + number)                            # as a shell would report it
        sys.__excepthook__(number, *error)

    sys.excepthook = stopped
    handlers = {n: signal.signal(n, stopped) for n in (signal.SIGTERM, signal.SIGINT)}
    for epoch in range(start, args.epochs):
        line = {"epoch": epoch, "step": step}
        # -------------------------------------------------------- EVALUATE, before training too
        if args.eval_every and epoch % args.eval_every == 0:
            scores, grid = evaluate(pipe, "ema", held, eval_sigmas, rewards, args.micro_batch,
                                    args.size, args.guidance)             # (m,n)
            line |= summary(scores)
            if rank == 0:
                save_grid(out / f"grid-{epoch:05d}.png", grid)
            say(f"epoch {epoch:4d}  held out: sum {sum(line['eval']):.3f}  " + "  ".join(
                f"{n} {v:.3f}" for n, v in zip(names, line["eval"], strict=True)))

        # -------------------------------------------------------- SAMPLE with the old policy, SCORE
        clock = time.time()
        plan = torch.randperm(len(prompts), generator=generator(args.seed, "plan", epoch))[:P]
        of = plan[torch.arange(B) % P]                                    # (B,) prompt of an image
        raw = torch.zeros(m, B, dtype=torch.float64)
        x0s, jobs = {}, {}                               # by chunk: clean latents, their scores
        mine = [c for c in range(len(parts)) if c // args.updates % world == rank]
        use(net, "old")
        with ThreadPoolExecutor(1) as pool:              # scores a chunk while the next is drawn
            for c in tqdm(mine, f"sample {epoch}", leave=False, disable=rank > 0 or None):
                index, pick = parts[c], of[parts[c]]
                noise = normal(shape, args.seed, "sample", epoch, index=index).to(device)
                words = tuple(e[pick] for e in text)
                x0s[c] = sample(pipe, words, sigmas, noise, args.guidance, empty)
                jobs[c] = pool.submit(score, rewards, decode(pipe, x0s[c]),
                                      [prompts[k] for k in pick], [metadata[k] for k in pick])
        for c, job in jobs.items():
            raw[:, parts[c]] = job.result()                               # (m,b)
        raw, sampled = summed(raw, device), time.time() - clock           # (m,B)
        for name in (n for n, row in zip(names, raw) if not row.isfinite().any()):
            raise ValueError(f"reward {name}: not finite for any image of epoch {epoch}")

        # -------------------------------------------------------- CREDIT
        r = optimality(group_advantage(raw, of, args.std), args.adv_clip)           # (m,B)
        steps = torch.rand(B, T, generator=generator(args.seed, "levels", epoch)).argsort(1)
        steps = steps[:, :args.levels]                                              # (B,levels)
        log = torch.zeros(3 + 2 * T, dtype=torch.float64)    # loss, kl, moved; loss, count by step

        # -------------------------------------------------------- UPDATE
        use(net, "default")
        for u in range(args.updates):
            total = args.levels * sum(map(len, parts[u::args.updates]))
            flat = torch.zeros(sum(p.numel() for p in new), dtype=torch.float64, device=device)
            for c, k in ((c, k) for c in mine if c % args.updates == u for k in range(args.levels)):
                index = parts[c]
                words, j = tuple(e[of[index]] for e in text), steps[index, k]       # (b,)
                t, x0 = sigmas[j].to(device), x0s[c]                                # (b,)
                noise = normal(shape, args.seed, "noise", epoch, k, index=index).to(device)
                xt = noised(x0, t, noise)                                           # (b,C,h,w)
                r_mix, coef = (a.to(device) for a in credit(W, j, r[:, index]))     # (b,), (b,)
                with torch.no_grad():
                    use(net, "old")
                    v_old = velocity(net, xt, t, words)                             # (b,C,h,w)
                    use(net, None)
                    v_base = velocity(net, xt, t, words)
                use(net, "default")
                v = velocity(net, xt, t, words)
                loss = coef * nft_loss(v, v_old, xt, x0, t, r_mix, args.beta)       # (b,)
                kl = (v - v_base).square().mean((1, 2, 3))                          # (b,)
                grads = torch.autograd.grad((loss + args.kl_weight * kl).sum() / total, new)
                flat += torch.cat([g.flatten() for g in grads]).double()
                with torch.no_grad():
                    moved = (v - v_old).square().mean((1, 2, 3)).sqrt()
                    log[:3] += torch.stack([x.double().sum().cpu() for x in (loss, kl, moved)])
                    log[3:3 + T].index_add_(0, j, loss.double().cpu())
                    log[3 + T:].index_add_(0, j, torch.ones(len(j)).double())
            flat = summed(flat, device)                      # the one all-reduce of this update
            step, norm = step + 1, flat.norm().item()
            skipped = 0 if flat.isfinite().all() else skipped + 1
            if skipped == 5:
                raise FloatingPointError("five updates in a row without a finite gradient")
            if skipped:
                say(f"epoch {epoch}: update {step} skipped, its gradient is not finite")
                continue
            flat *= min(1.0, args.max_grad_norm / (norm + 1e-12))
            for p, g in zip(new, flat.split([p.numel() for p in new]), strict=True):
                p.grad = g.view_as(p).to(p.dtype)
            opt.step()
            blend(ema, new, 0.9)
        blend(old, new, old_policy_decay(step, args.decay))
        bits = sum(p.view(torch.int32).sum(dtype=torch.int64) for p in new + old + ema)
        if world * bits != summed(bits.clone(), device):
            raise RuntimeError(f"epoch {epoch}: the weights of rank {rank} differ from others'")

        # -------------------------------------------------------- LOG
        log = summed(log, device)
        loss, kl, moved = (log[:3] / (B * args.levels)).tolist()
        good = [row[row.isfinite()] for row in raw]
        dead = [sum(bool(row[of == k].min() == row[of == k].max()) for k in plan) for row in raw]
        for name in (n for n, row in zip(names, good) if row.min() == row.max()):
            say(f"epoch {epoch}: reward {name} is the same for every image")
        line |= {"reward": [x.mean().item() for x in good], "dead_groups": dead,
                 "weights": bits.item(), "skipped": step - int(opt.state[new[0]].get("step", 0)),
                 "reward_std": [x.std().item() for x in good],
                 "not_finite": int((~raw.isfinite()).sum()),
                 "r_min": r.min().item(), "r_max": r.max().item(), "loss": loss, "kl": kl,
                 "kl_share": args.kl_weight * kl / (args.kl_weight * kl + loss),
                 "moved": moved, "grad_norm": norm,
                 "sample_seconds": round(sampled, 2), "seconds": round(time.time() - clock, 2),
                 "loss_by_step": (log[3:3 + T] / log[3 + T:].clamp_min(1)).tolist()}
        say(f"epoch {epoch:4d}  reward sum {sum(line['reward']):.3f}  loss {loss:.3f}  |v-v_old| "
            f"{moved:.3f}  grad {norm:.2f}  {line['seconds']:.1f} s")

        # -------------------------------------------------------- SAVE
        last = (epoch + 1, step, *snapshot(net, opt))
        if rank == 0:
            try:
                with (out / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
                    save_checkpoint(out, args.keep, *last, config)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(out / f"checkpoint-{epoch + 1:05d}.part", ignore_errors=True)
                fail(f"--out {out}: cannot save epoch {epoch + 1}, the checkpoints before it are "
                     f"whole: {error}")

    for number, handler in handlers.items():
        signal.signal(number, handler)
    # ------------------------------------------------------------ REPORT: base -> trained
    say(f"final evaluation on {len(held[0])} held-out prompts, base and trained, with judges")
    before, after = (evaluate(pipe, name, held, eval_sigmas, both, args.micro_batch, args.size,
                              args.guidance) for name in (None, "ema"))
    if rank == 0:
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"epoch": args.epochs, **summary(after[0][:m])}) + "\n")
        save_grid(out / "base-and-trained.png", torch.cat([before[1], after[1]]), 16)
        lines = table(before[0], after[0], [*both], [*both][m:])
        write(out / "report.md", "\n".join(lines) + "\n")
        say("\n".join(lines))
        plot_runs(out / "plot.png", {out: about})


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    main()
